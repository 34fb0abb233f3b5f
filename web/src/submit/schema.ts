/* From the job's JSON schema to the fields of a form. */

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
export type Document = { [name: string]: Json };

export interface Schema {
  $ref?: string;
  $defs?: Record<string, Schema>;
  anyOf?: Schema[];
  type?: string;
  enum?: Json[];
  properties?: Record<string, Schema>;
  required?: string[];
  items?: Schema;
  additionalProperties?: Schema | boolean;
  description?: string;
  default?: Json;
}

export type FieldKind = "text" | "number" | "boolean" | "choice" | "lines" | "pairs" | "value" | "group";

export interface FormField {
  path: string; // dataset.batch_size
  name: string;
  kind: FieldKind;
  about: string;
  fallback: Json | undefined; // what is used where nothing is given
  isRequired: boolean;
  choices: readonly string[];
  fields: readonly FormField[]; // of a group
}

function resolve(schema: Schema, root: Schema): Schema {
  const name = schema.$ref?.replace("#/$defs/", "");
  const target = name === undefined ? undefined : root.$defs?.[name];
  return target === undefined ? schema : { ...resolve(target, root), ...(schema.default === undefined ? {} : { default: schema.default }) };
}

/** The schema without "or null", and its alternatives if there are several. */
function unwrap(schema: Schema, root: Schema): { main: Schema; others: Schema[] } {
  const whole = resolve(schema, root);
  const options = (whole.anyOf ?? [whole]).map((one) => resolve(one, root)).filter((one) => one.type !== "null");
  const [first, ...others] = options;
  return { main: first ?? whole, others };
}

function kindOf(main: Schema, others: readonly Schema[], root: Schema): FieldKind {
  if (others.length > 0) return "value";
  if (main.enum !== undefined) return "choice";
  if (main.properties !== undefined) return "group";
  switch (main.type) {
    case "string": return "text";
    case "integer":
    case "number": return "number";
    case "boolean": return "boolean";
    case "object": return "pairs";
    case "array": return main.items !== undefined && resolve(main.items, root).type === "string" ? "lines" : "value";
    default: return "value";
  }
}

function readField(name: string, schema: Schema, parent: string, isRequired: boolean, root: Schema): FormField {
  const { main, others } = unwrap(schema, root);
  const path = parent === "" ? name : `${parent}.${name}`;
  const kind = kindOf(main, others, root);
  return {
    path, name, kind, isRequired,
    about: schema.description ?? (kind === "group" ? "" : (main.description ?? "")),
    fallback: schema.default,
    choices: kind === "choice" ? (main.enum ?? []).map(String) : [],
    fields: kind === "group" ? readFields(main, path, root) : [],
  };
}

function readFields(schema: Schema, parent: string, root: Schema): FormField[] {
  const required = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).map(([name, one]) => readField(name, one, parent, required.has(name), root));
}

/** All fields of a job. */
export function readForm(root: Schema): FormField[] {
  return readFields(resolve(root, root), "", root);
}

/** What most jobs give, in the order in which one thinks of it. The rest is one click away. */
const FIRST = ["trainer", "run_id", "name", "max_steps", "epochs", "hyperparams", "dataset", "validate_every", "validation", "resources", "tags", "group"];

/** Of a server or a prediction: what it trains on says nothing about it. */
const FIRST_OF_INFERENCE = ["trainer", "run_id", "name", "serving", "prediction", "resources", "tags", "group"];

export function splitForm(fields: readonly FormField[], job: Document = {}): { first: FormField[]; rest: FormField[] } {
  const isInference = job["mode"] === "inference";
  const order = (isInference ? FIRST_OF_INFERENCE : FIRST).filter((name) => !["serving", "prediction"].includes(name) || name in job);
  const place = (field: FormField): number => order.indexOf(field.name);
  return {
    first: fields.filter((field) => place(field) >= 0).sort((left, right) => place(left) - place(right)),
    rest: fields.filter((field) => place(field) < 0 && field.name !== "trainer_api_version"),
  };
}

export function listPaths(fields: readonly FormField[]): string[] {
  return fields.flatMap((field) => [field.path, ...listPaths(field.fields)]);
}
