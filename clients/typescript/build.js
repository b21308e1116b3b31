/**
 * Builds the package into `dist`, or into the folder that is given as an argument.
 *
 * The package contains the modules of `src` without their types, and the modules of the page's `core` that they import.
 * Imports become relative, so that a browser needs neither a bundler nor an import map. `--types` adds the type
 * declarations, for which typescript must be installed. Node itself removes the types (22.13 or later).
 */
import { execFileSync } from "node:child_process";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { stripTypeScriptTypes } from "node:module";
import { dirname, join } from "node:path";
import { parseArgs } from "node:util";

const HERE = import.meta.dirname;
const { values, positionals } = parseArgs({ options: { types: { type: "boolean" } }, allowPositionals: true });
const target = positionals[0] ?? join(HERE, "dist");

/** Return the text of a module with the imports of the built package. `#core/` becomes the folder `core`, and `.ts`
 * becomes `.js`. */
function relate(text, name) {
  const core = name.startsWith("core/") ? "./" : "./core/";
  return text.replaceAll('"#core/', `"${core}`).replace(/(from|import) "(\.\/[\w/]+)\.ts"/g, '$1 "$2.js"');
}

function write(name, text) {
  const path = join(target, name);
  mkdirSync(dirname(path), { recursive: true });
  writeFileSync(path, relate(text, name));
}

rmSync(target, { recursive: true, force: true });
const sources = readdirSync(join(HERE, "src")).filter((it) => it.endsWith(".ts"));
const waiting = [];
for (const name of sources) {
  const text = stripTypeScriptTypes(readFileSync(join(HERE, "src", name), "utf8")).replace(/[ \t]+$/gm, "");
  write(name.replace(/\.ts$/, ".js"), text);
  waiting.push(...text.matchAll(/from "\.\/core\/([\w]+\.js)"/g));
}
const taken = new Set();
for (let found = waiting.pop(); found !== undefined; found = waiting.pop()) {
  if (taken.has(found[1])) continue;
  taken.add(found[1]);
  const text = readFileSync(join(HERE, "src", "core", found[1]), "utf8");
  write(`core/${found[1]}`, text);
  waiting.push(...text.matchAll(/^import .* from "#core\/([\w]+\.js)"/gm));
}

if (values.types) {
  const tsc = join(HERE, "node_modules", "typescript", "bin", "tsc");
  const options = ["--noEmit", "false", "--emitDeclarationOnly", "--declaration", "--outDir", target];
  execFileSync(process.execPath, [tsc, "--project", HERE, ...options], { stdio: "inherit" });
  for (const name of readdirSync(target, { recursive: true })) {
    if (name.endsWith(".d.ts")) write(name, readFileSync(join(target, name), "utf8"));
  }
}
