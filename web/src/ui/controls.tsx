/* Buttons, fields, choices, progress. */

import type { ButtonHTMLAttributes, ComponentChildren } from "preact";
import { useId } from "preact/hooks";

import { withCode } from "./code";
import type { IconName } from "./icon";
import { Icon } from "./icon";

type ButtonProps = Omit<ButtonHTMLAttributes<HTMLButtonElement>, "icon" | "kind" | "label" | "type"> & {
  icon?: IconName;
  kind?: "plain" | "primary" | "quiet" | "danger" | "danger primary";
  isSmall?: boolean;
  disabled?: boolean;
  type?: "button" | "submit";
  /** Of a button without text: what it does. It is also the tooltip. */
  label?: string;
  children?: ComponentChildren;
};

export function Button({ icon, kind = "plain", isSmall = false, label, children, type = "button", ...rest }: ButtonProps) {
  const isIcon = children === undefined || children === null;
  const names = ["button", kind === "plain" ? "" : kind, isSmall ? "small" : "", isIcon ? "icon" : "", rest.class ?? ""];
  return (
    <button {...rest} type={type} class={names.filter(Boolean).join(" ")}
      {...(label === undefined ? {} : { "aria-label": label, title: label })}>
      {icon !== undefined && <Icon name={icon} />}
      {children}
    </button>
  );
}

interface FieldProps {
  label: string;
  hint?: ComponentChildren;
  faults?: readonly string[];
  kind?: string; // a class of its own
  path?: string; // of a field of a job: to find it by
  children: (attributes: { id: string; "aria-describedby": string; "aria-invalid": "true" | "false" }) => ComponentChildren;
}

/** A labelled field with its hint and its faults. */
export function Field({ label, hint, faults = [], kind = "", path, children }: FieldProps) {
  const id = useId();
  return (
    <div class={`field ${kind}`} data-path={path}>
      <label for={id}>{label}</label>
      {children({ id, "aria-describedby": `${id}-about`, "aria-invalid": faults.length > 0 ? "true" : "false" })}
      <div id={`${id}-about`}>
        {faults.map((fault) => <p class="fault" key={fault}>{withCode(fault)}</p>)}
        {hint !== undefined && <p class="hint">{hint}</p>}
      </div>
    </div>
  );
}

interface SegmentedProps<T extends string> {
  label: string;
  options: readonly { value: T; label: string; title?: string }[];
  value: T;
  onChange: (value: T) => void;
}

/** One of a few. */
export function Segmented<T extends string>({ label, options, value, onChange }: SegmentedProps<T>) {
  return (
    <div class="segmented" role="group" aria-label={label}>
      {options.map((option) => (
        <button type="button" key={option.value} aria-pressed={option.value === value} title={option.title ?? option.label}
          onClick={() => onChange(option.value)}>
          {option.label}
        </button>
      ))}
    </div>
  );
}

/** How much of something is done. `max` null: nobody knows how much there is. */
export function Bar({ value, max, label, kind = "" }: { value: number; max: number | null; label: string; kind?: string }) {
  const share = max === null || max <= 0 ? 0 : Math.min(1, Math.max(0, value / max));
  return (
    <div class={`bar ${kind}`} role="progressbar" aria-label={label} aria-valuemin={0}
      {...(max === null ? {} : { "aria-valuemax": max, "aria-valuenow": Math.min(value, max) })}>
      <i style={{ width: `${(share * 100).toFixed(1)}%` }} />
    </div>
  );
}

/** Views of one thing, as links. */
export function Tabs({ label, tabs, current }: {
  label: string;
  tabs: readonly { key: string; label: string; href: string }[];
  current: string;
}) {
  return (
    <nav class="tabs" aria-label={label}>
      {tabs.map((tab) => (
        <a key={tab.key} href={tab.href} aria-current={tab.key === current ? "page" : undefined}>{tab.label}</a>
      ))}
    </nav>
  );
}
