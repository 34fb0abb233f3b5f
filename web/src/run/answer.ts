/* An answer of the API in a component: asked for when it is first shown and when its key changes. */

import { useCallback, useEffect, useState } from "preact/hooks";

import type { ApiError } from "../api";
import { asApiError } from "../store";

export interface Answer<T> {
  /** Of an earlier request while a newer one is on its way; null: none has come. */
  value: T | null;
  error: ApiError | null;
  reload: () => void;
}

export function useAnswer<T>(load: (abort: AbortSignal) => Promise<T>, key: string): Answer<T> {
  const [state, setState] = useState<{ key: string; value: T | null; error: ApiError | null }>({ key, value: null, error: null });
  const [count, setCount] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    load(abort.signal).then(
      (value) => setState({ key, value, error: null }),
      (reason: unknown) => {
        if (!abort.signal.aborted) setState((old) => ({ key, value: old.key === key ? old.value : null, error: asApiError(reason) }));
      },
    );
    return () => abort.abort();
  }, [key, count]);
  const isCurrent = state.key === key;
  return {
    value: isCurrent ? state.value : null,
    error: isCurrent ? state.error : null,
    reload: useCallback(() => setCount((old) => old + 1), []),
  };
}
