/* The views that draw charts, in one file of their own. */

export { CompareView } from "./compare/compare_view";
export { RunView } from "./run/run_view";
