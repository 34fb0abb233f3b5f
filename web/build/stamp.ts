/* What the built page was made of, so that a test can tell without Node whether it is up to date. */

import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";
import { gzipAsync } from "@gfx/zopfli";
import type { Plugin } from "vite";

export const STAMP = "built-from.json";

/** Everything in `web/` that a build reads: not what npm installed, and not the tests. */
const SOURCES = ["build", "public", "src", "index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"];

function listFiles(path: string): string[] {
  try {
    return readdirSync(path, { withFileTypes: true })
      .flatMap((entry) => (entry.isDirectory() ? listFiles(join(path, entry.name)) : [join(path, entry.name)]));
  } catch {
    return [path]; // a file
  }
}

function hashFiles(root: string, paths: string[]): Record<string, string> {
  const names = paths.map((path) => relative(root, path).split(sep).join("/")).sort();
  return Object.fromEntries(
    names.map((name) => [name, createHash("sha256").update(readFileSync(join(root, name))).digest("hex")]),
  );
}

/** Writes a `.gz` beside each built file, and the hashes of all sources and all built files. */
export function stamp(webRoot: string, outDir: string): Plugin {
  return {
    name: "stamp",
    apply: "build",
    async closeBundle() {
      for (const path of listFiles(outDir)) {
        if (path.endsWith(".gz")) continue;
        writeFileSync(`${path}.gz`, await gzipAsync(readFileSync(path), { numiterations: 15 })); // 3 % smaller than zlib's
      }
      const sources = hashFiles(webRoot, SOURCES.flatMap((name) => listFiles(join(webRoot, name))));
      const built = hashFiles(outDir, listFiles(outDir));
      writeFileSync(join(outDir, STAMP), `${JSON.stringify({ sources, built }, null, 1)}\n`);
    },
  };
}
