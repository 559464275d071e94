// an admin key -> a session.
import { useState } from "react";
import type { Session } from "../api.ts";
import { post, Refused } from "../client.ts";
import { Button, Text } from "../parts/ui.tsx";

export function SignInPage({ onSignedIn }: { onSignedIn: (session: Session) => void }) {
  const [key, setKey] = useState("");
  const [error, setError] = useState<Refused | null>(null);
  const [isBusy, setIsBusy] = useState(false);
  const go = async () => {
    setIsBusy(true);
    setError(null);
    try {
      onSignedIn(await post<Session>("session", { key: key.trim() }));
    } catch (problem) {
      setError(problem instanceof Refused ? problem : new Refused(0, String(problem)));
      setIsBusy(false);
    }
  };
  return (
    <main className="signin">
      <form
        className="panel"
        onSubmit={(event) => {
          event.preventDefault();
          void go();
        }}
      >
        <img src={`${import.meta.env.BASE_URL}favicon.svg`} width="44" height="44" alt="" />
        <h1>Paceline</h1>
        <p className="muted">Sign in to see and steer the drafts that learn on this cluster.</p>
        <Text
          label="Admin key"
          type="password"
          value={key}
          autoFocus
          required
          autoComplete="current-password"
          aria-describedby="where"
          onChange={(event) => setKey(event.target.value)}
        />
        {error && (
          <p className="notice bad" role="alert">
            {error.status === 401 ? "That is not the admin key." : error.message} {error.action}
          </p>
        )}
        <Button type="submit" tone="primary" disabled={isBusy || !key.trim()}>
          {isBusy ? "Signing in …" : "Sign in"}
        </Button>
        <p id="where" className="hint">
          <code>paceline serve</code> prints where the key is kept: <code>admin.key</code> in PACELINE_HOME, or PACELINE_ADMIN_KEY. API keys of
          scope admin open this page as well.
        </p>
      </form>
    </main>
  );
}
