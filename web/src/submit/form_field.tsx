/* One field of the form, or a group of them. */

import { useId, useState } from "preact/hooks";

import { withCode } from "../ui/code";
import { Field } from "../ui/controls";
import { getAt, parseText, showText } from "./document";
import type { Document, FormField, Json } from "./schema";

interface FormFieldProps {
  field: FormField;
  job: Document;
  faults: ReadonlyMap<string, readonly string[]>;
  onChange: (path: string, value: Json | undefined) => void;
}

/** Opens what it is in, and goes there. */
export function showField(path: string): void {
  const field = document.querySelector<HTMLElement>(`[data-path="${CSS.escape(path)}"]`);
  for (let at = field; at !== null; at = at.parentElement?.closest("details") ?? null) if (at instanceof HTMLDetailsElement) at.open = true;
  field?.scrollIntoView({ block: "center" });
  field?.querySelector<HTMLElement>("input, select, textarea, summary")?.focus({ preventScroll: true });
}

export function FormFieldView(props: FormFieldProps) {
  return props.field.kind === "group" ? <Group {...props} /> : <Single {...props} />;
}

const label = (field: FormField): string => (field.isRequired ? `${field.name} (required)` : field.name);

const HINTS: Partial<Record<FormField["kind"], string>> = {
  lines: "One per line.",
  pairs: "One per line: `name: value`.",
};

function Single({ field, job, faults, onChange }: FormFieldProps) {
  const value = getAt(job, field.path);
  const [text, setText] = useState(() => showText(field.kind, value));
  const fallback = field.fallback === undefined || field.fallback === null ? "" : showText(field.kind, field.fallback);
  const take = (next: string): void => {
    setText(next);
    onChange(field.path, parseText(field.kind, next));
  };
  const hint = [field.about, HINTS[field.kind]].filter(Boolean).join(" ");
  return (
    <Field label={label(field)} kind={`is-${field.kind}`} path={field.path} faults={faults.get(field.path) ?? []} {...(hint === "" ? {} : { hint: withCode(hint) })}>
      {(attributes) => {
        const common = { ...attributes, class: "input", value: text, spellcheck: false };
        switch (field.kind) {
          case "choice":
          case "boolean":
            return (
              <select {...common} onChange={(event) => take(event.currentTarget.value)}>
                <option value="">{fallback === "" ? "–" : `default: ${fallback}`}</option>
                {(field.kind === "boolean" ? ["true", "false"] : field.choices).map((one) => <option key={one} value={one}>{one}</option>)}
              </select>
            );
          case "lines":
          case "pairs":
            return (
              <textarea {...common} rows={Math.min(12, Math.max(2, text.split("\n").length + 1))} placeholder={fallback}
                onInput={(event) => take(event.currentTarget.value)} />
            );
          default:
            return (
              <input {...common} type="text" inputMode={field.kind === "number" ? "decimal" : "text"} placeholder={fallback} autocomplete="off"
                onInput={(event) => take(event.currentTarget.value)} />
            );
        }
      }}
    </Field>
  );
}

function Group(props: FormFieldProps) {
  const { field, job, faults } = props;
  const id = useId();
  const inside = [...faults].filter(([path]) => path.startsWith(`${field.path}.`)).length;
  const own = faults.get(field.path) ?? [];
  const [isOpen, setOpen] = useState(getAt(job, field.path) !== undefined || field.name === "dataset");
  return (
    <details class="form-group" data-path={field.path} open={isOpen || inside > 0} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary><strong>{label(field)}</strong>{field.about !== "" && <span class="muted"> {withCode(field.about)}</span>}</summary>
      {own.map((fault) => <p class="fault" key={fault} id={id}>{withCode(fault)}</p>)}
      <div class="form-grid">{field.fields.map((one) => <FormFieldView key={one.path} {...props} field={one} />)}</div>
    </details>
  );
}
