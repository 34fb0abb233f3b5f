import { fileURLToPath } from "node:url";

import { defineConfig } from "vitest/config";

import { stamp } from "./build/stamp.ts";

const webRoot = fileURLToPath(new URL(".", import.meta.url));
const outDir = fileURLToPath(new URL("../src/trn/gateway/static", import.meta.url));

// For development: where a gateway runs, and its bearer, both from `trn ui --json`.
const gateway = process.env["TRN_PAGE_API"];
const headers = { Authorization: `Bearer ${process.env["TRN_PAGE_BEARER"] ?? ""}`, Origin: gateway ?? "" };

export default defineConfig({
  root: webRoot,
  plugins: [stamp(webRoot, outDir)],
  build: {
    outDir,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0, // the page's policy allows no data: addresses
    cssCodeSplit: false, // one file compresses better than five
    reportCompressedSize: false,
  },
  ...(gateway === undefined ? {} : { server: { proxy: { "/api": { target: gateway, changeOrigin: true, headers } } } }),
  test: {
    include: ["test/**/*.test.ts", "test/**/*.test.tsx"],
    environment: "node",
    pool: "threads",
    isolate: false,
    testTimeout: 60_000, // a gigabyte of log takes seconds, and other work may have the machine
  },
});
