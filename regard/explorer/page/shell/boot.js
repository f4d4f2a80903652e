// Starts the page of a server or of an exported file, which may stand in a frame without an address of its own.

import { addCatalogues } from "../shared/messages.js";
import { EmbeddedSource, hideToken, HttpSource } from "../source/source.js";
import { start } from "./main.js";

/** @param {string} id  of a <script type="application/json"> that Python wrote */
function carried(id) {
  const text = document.getElementById(id)?.textContent;
  return text ? JSON.parse(text) : null;
}

const element = document.getElementById("regard");
if (element !== null) {
  const data = carried("regard-data");
  addCatalogues(carried("regard-catalogues") ?? {});
  if (data === null) hideToken();
  const source = data === null ? new HttpSource(".") : new EmbeddedSource(data);
  start(element, source, { hash: location.protocol !== "about:", lang: data?.lang, view: carried("regard-view") ?? "" });
}
