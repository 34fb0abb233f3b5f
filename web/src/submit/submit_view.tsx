/* A new run. */

import { Empty } from "../ui/notice";

export function SubmitView() {
  return <Empty title="Submit" />;
}
