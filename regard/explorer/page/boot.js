// Starts the page: from the data that it carries, or else from the server that sent it.
// It does not know what the page shows.

import { start } from "./main.js";
import { EmbeddedSource, HttpSource, hideToken } from "./source.js";

const element = document.getElementById("regard");
const carried = document.getElementById("regard-data");
if (element !== null) {
  const data = carried === null ? null : JSON.parse(carried.textContent ?? "");
  if (data === null) hideToken();
  start(element, data === null ? new HttpSource(".") : new EmbeddedSource(data), { hash: true, lang: data?.lang });
}
