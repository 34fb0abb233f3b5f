/* Text of the server: what stands in backticks is code. */

import type { ComponentChildren } from "preact";

/** Names in backticks as code. */
export const withCode = (text: string): ComponentChildren =>
  text.split("`").map((part, index) => (index % 2 === 1 ? <code key={index}>{part}</code> : part));
