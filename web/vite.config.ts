import { fileURLToPath } from "node:url";

import { defineConfig } from "vitest/config";

import { stamp } from "./build/stamp.ts";

const webRoot = fileURLToPath(new URL(".", import.meta.url));
const outDir = fileURLToPath(new URL("../src/trn/gateway/static", import.meta.url));

// `TRN_PAGE_API=http://127.0.0.1:PORT npm run dev` serves the sources and sends API calls to a running gateway.
const gateway = process.env["TRN_PAGE_API"];

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
  ...(gateway === undefined ? {} : { server: { proxy: { "/api": { target: gateway, changeOrigin: true } } } }),
  test: { include: ["test/**/*.test.ts", "test/**/*.test.tsx"], environment: "node" },
});
