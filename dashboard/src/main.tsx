// index.html -> the dashboard.
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import "uplot/dist/uPlot.min.css";
import "./styles.css";
import { App } from "./app.tsx";
import { readTheme } from "./look.ts";

document.documentElement.dataset.theme = readTheme();
createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <App />
  </StrictMode>,
);
