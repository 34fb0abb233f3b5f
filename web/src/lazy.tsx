/* Views that are loaded when they are first shown. */

import { signal } from "@preact/signals";
import type { ComponentType } from "preact";

import { ApiError } from "./api";
import { ErrorNotice, Loading } from "./ui/notice";

/** A component whose code is fetched on first use. `load` is tried again on "Try again". */
export function lazy<P extends object>(load: () => Promise<ComponentType<P>>): ComponentType<P> {
  const state = signal<{ view: ComponentType<P> | null; error: ApiError | null }>({ view: null, error: null });
  let isAsked = false;
  const ask = (): void => {
    isAsked = true;
    load().then(
      (view) => { state.value = { view, error: null }; },
      () => {
        isAsked = false;
        state.value = { view: null, error: new ApiError(0, "unavailable", "This part of the page could not be loaded.") };
      },
    );
  };
  return function Lazy(props: P) {
    const { view: View, error } = state.value;
    if (View !== null) return <View {...props} />;
    if (error !== null) return <ErrorNotice error={error} retry={ask} />;
    if (!isAsked) ask();
    return <Loading what="the view" />;
  };
}
