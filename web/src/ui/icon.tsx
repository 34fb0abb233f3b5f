/* Icons as paths on a 16 × 16 grid. They are decoration: the word stands beside them or in the button's label. */

const PATHS = {
  running: "M8 2a6 6 0 1 1-6 6",
  pending: "M8 2.2a5.8 5.8 0 1 0 0 11.6A5.8 5.8 0 0 0 8 2.2M8 5v3.2l2 1.4",
  dispatching: "M3 8h9M8.5 4.5 12 8l-3.5 3.5",
  completed: "M3 8.5 6.5 12 13 4.5",
  failed: "M8 2v7M8 12.6v.9",
  cancelled: "M8 2.2a5.8 5.8 0 1 0 0 11.6A5.8 5.8 0 0 0 8 2.2M4.2 11.8l7.6-7.6",
  unknown: "M5.8 6a2.2 2.2 0 1 1 3 2c-.6.3-.8.7-.8 1.5M8 12.4v.6",
  exact: "M8 1.8l5 1.8v4.2c0 3-2 5.2-5 6.4-3-1.2-5-3.4-5-6.4V3.6zM5.6 8l1.8 1.8L10.6 6.4",
  close: "M4 4l8 8M12 4l-8 8",
  more: "M3 8h.01M8 8h.01M13 8h.01",
  down: "M4 6l4 4 4-4",
  up: "M4 10l4-4 4 4",
  right: "M6 4l4 4-4 4",
  left: "M10 4 6 8l4 4",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9M10.3 10.3 14 14",
  columns: "M2.5 3h11v10h-11zM6.2 3v10M9.8 3v10",
  filter: "M2 3.5h12L9.5 8.5V13l-3-1.5v-3z",
  moon: "M13 9.5A5.5 5.5 0 1 1 6.5 3a4.5 4.5 0 0 0 6.5 6.5z",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6M8 1.2v1.3M8 13.5v1.3M1.2 8h1.3M13.5 8h1.3M3.2 3.2l.9.9M11.9 11.9l.9.9M12.8 3.2l-.9.9M4.1 11.9l-.9.9",
  help: "M5.8 6a2.2 2.2 0 1 1 3 2c-.6.3-.8.7-.8 1.5M8 12.4v.6",
  warning: "M8 2 1.5 13.5h13zM8 6.5v3M8 11.6v.4",
  info: "M8 2.2a5.8 5.8 0 1 0 0 11.6A5.8 5.8 0 0 0 8 2.2M8 7.2v4M8 4.8v.4",
  compare: "M2 12 6 6l3 4 5-7M2 14h12",
  play: "M4.5 3v10l8-5z",
  pause: "M5 3v10M11 3v10",
  stop: "M4 4h8v8H4z",
  repeat: "M3 8a5 5 0 0 1 8.5-3.5L13 6M13 2.5V6H9.5M13 8a5 5 0 0 1-8.5 3.5L3 10M3 13.5V10h3.5",
  trash: "M2.5 4.5h11M6 4.5V3h4v1.5M4 4.5l.7 9h6.6l.7-9M6.7 7v4M9.3 7v4",
  edit: "M3 13l.6-2.8L10.8 3l2.2 2.2-7.2 7.2zM9.4 4.4l2.2 2.2",
  tag: "M2.5 2.5h5l6 6-5 5-6-6zM5.3 5.3h.01",
  copy: "M5.5 5.5h8v8h-8zM3.5 10.5h-1v-8h8v1",
  download: "M8 2.5v8M4.8 7.5 8 10.7l3.2-3.2M2.5 13.5h11",
  link: "M6.5 9.5l3-3M7 4.5l1.6-1.6a2.9 2.9 0 0 1 4.1 4.1L11.2 8.6M9 11.5l-1.6 1.6a2.9 2.9 0 0 1-4.1-4.1L4.8 7.4",
  fork: "M4.5 13.5v-11M4.5 9.5c4.5 0 7-1.2 7-4.5M9 7l2.5-2.5L14 7",
  plus: "M8 3v10M3 8h10",
  bell: "M4 11V7.5a4 4 0 0 1 8 0V11l1.2 1.5H2.8zM6.8 14.2h2.4",
  fit: "M2.5 6V2.5H6M10 2.5h3.5V6M13.5 10v3.5H10M6 13.5H2.5V10",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, size = 16 }: { name: IconName; size?: number }) {
  const width = name === "more" ? 2.6 : name === "failed" ? 2.2 : 1.6;
  return (
    <svg width={size} height={size} viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width={width}
      stroke-linecap="round" stroke-linejoin="round" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}
