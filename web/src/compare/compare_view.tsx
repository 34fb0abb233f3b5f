/* Two or more runs side by side. */

import { Empty } from "../ui/notice";

export function CompareView() {
  return <Empty title="Compare" />;
}
