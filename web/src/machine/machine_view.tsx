/* The machine. */

import { Empty } from "../ui/notice";

export function MachineView() {
  return <Empty title="Machine" />;
}
