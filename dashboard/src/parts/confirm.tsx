// an action somebody wants -> one question that says what will happen -> the call -> what came of it.
import { createContext, type ReactNode, useCallback, useContext, useEffect, useId, useRef, useState } from "react";
import type { ActionBody, ActionName, ActionResult } from "../api.ts";
import { post, Refused } from "../client.ts";
import { Button, Text } from "./ui.tsx";

interface Asked {
  title: string;
  /** What will happen, in a sentence or two. */
  effect: ReactNode;
  /** On the button that does it. */
  label: string;
  /** It deletes or takes something away. */
  isDangerous?: boolean;
  /** What must be typed before it can be done. */
  mustType?: string;
}

/** An action, with a reason for the audit; or something else that is done by a call of its own and says what came of it. */
export type Question = Asked & ({ name: ActionName; body: ActionBody; send?: undefined } | { send: () => Promise<ActionResult> });

interface Toast {
  id: number;
  text: string;
}

const AskContext = createContext<(question: Question) => void>(() => {});
export const useAsk = () => useContext(AskContext);
const SayContext = createContext<(text: string) => void>(() => {});
export const useSay = () => useContext(SayContext);

const TOAST_MS = 8000;

export function Confirm({ children }: { children: ReactNode }) {
  const [question, setQuestion] = useState<Question | null>(null);
  const [toasts, setToasts] = useState<Toast[]>([]);
  const next = useRef(0);
  const say = useCallback((text: string) => {
    const id = next.current++;
    setToasts((old) => [...old.slice(-2), { id, text }]);
    window.setTimeout(() => setToasts((old) => old.filter((toast) => toast.id !== id)), TOAST_MS);
  }, []);
  return (
    <AskContext value={setQuestion}>
      <SayContext value={say}>
        {children}
        {question && (
          <Dialog
            question={question}
            onClose={(result) => {
              setQuestion(null);
              if (result) say(result.message);
            }}
          />
        )}
        <div className="toasts" role="status" aria-live="polite">
          {toasts.map((toast) => (
            <div key={toast.id} className="toast">
              {toast.text}
            </div>
          ))}
        </div>
      </SayContext>
    </AskContext>
  );
}

function Dialog({ question, onClose }: { question: Question; onClose: (result: ActionResult | null) => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const cancel = useRef<HTMLButtonElement>(null);
  const [reason, setReason] = useState("");
  const [typed, setTyped] = useState("");
  const [isBusy, setIsBusy] = useState(false);
  const [error, setError] = useState<Refused | null>(null);
  const id = useId();
  useEffect(() => {
    const before = document.activeElement;
    dialog.current?.showModal();
    cancel.current?.focus(); // a stray Enter does nothing
    return () => {
      if (before instanceof HTMLElement) before.focus();
    };
  }, []);
  const isReady = !question.mustType || typed === question.mustType;
  const go = async () => {
    setIsBusy(true);
    setError(null);
    try {
      onClose(await (question.send ? question.send() : post<ActionResult>(`actions/${question.name}`, { ...question.body, reason })));
    } catch (problem) {
      setError(problem instanceof Refused ? problem : new Refused(0, String(problem)));
      setIsBusy(false);
    }
  };
  return (
    <dialog ref={dialog} className="dialog" aria-labelledby={`${id}t`} aria-describedby={`${id}e`} onCancel={(event) => (event.preventDefault(), onClose(null))}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (isReady && !isBusy) void go();
        }}
      >
        <h2 id={`${id}t`}>{question.title}</h2>
        <div id={`${id}e`} className="dialog-effect">
          {question.effect}
        </div>
        {question.mustType && (
          <Text label={`Type ${question.mustType} to go on`} value={typed} onChange={(event) => setTyped(event.target.value)} />
        )}
        {!question.send && (
          <Text label="Reason, for the audit (optional)" value={reason} maxLength={200} onChange={(event) => setReason(event.target.value)} />
        )}
        {error && (
          <p className="notice bad" role="alert">
            {error.message} {error.action}
          </p>
        )}
        <div className="dialog-buttons">
          <Button ref={cancel} onClick={() => onClose(null)}>
            Cancel
          </Button>
          <Button type="submit" tone={question.isDangerous ? "danger" : "primary"} disabled={!isReady || isBusy}>
            {isBusy ? "Working …" : question.label}
          </Button>
        </div>
      </form>
    </dialog>
  );
}
