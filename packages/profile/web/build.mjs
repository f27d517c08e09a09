// Bundles src/ into the Python package. The first line of the result names its sources, so that a test without Node
// notices a source that changed without a build. `--check` compares instead of writing.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const folder = new URL("./", import.meta.url);
const output = new URL("../src/stack_profile/report/page.js", folder);
const digest = createHash("sha256");
for (const file of readdirSync(new URL("src/", folder)).sort()) {
  digest.update(`${file}\0`).update(readFileSync(new URL(`src/${file}`, folder)));
}
const { outputFiles } = await build({
  entryPoints: [new URL("src/main.ts", folder).pathname],
  bundle: true,
  minify: true,
  charset: "ascii",
  format: "iife",
  target: "es2022",
  legalComments: "none",
  write: false,
});
const built = `// Built by \`npm run build\` in packages/profile/web from sources ${digest.digest("hex")}.\n${outputFiles[0].text}`;
if (process.argv.includes("--check")) {
  if (readFileSync(output, "utf8") !== built) {
    console.error("page.js is not what its sources build: run `npm run build` in packages/profile/web, and commit it.");
    process.exit(1);
  }
} else {
  writeFileSync(output, built);
  console.log(`page.js: ${built.length.toLocaleString("en")} bytes`);
}
