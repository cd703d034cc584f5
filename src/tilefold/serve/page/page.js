"use strict";
// Everything that comes from the service or the user becomes text (textContent); no HTML is made from strings.

const FIRST_TERMS = 16;
const FIRST_CHARACTERS = 420;
const FIRST_MATCHES = 12;
const THUMBNAIL_WIDTH = 220; // pixels
const VIEWER_WIDTH = 1400; // pixels
const STAGES = { sparse: "learned sparse", words: "BM25", dense: "dense", fusion: "fused", late: "late interaction" };
const COMPARED = ["fusion", "rerank", "dense"]; // what gives a second ranking
const $ = (id) => document.getElementById(id);

let index = null; // what the service searches, or null
let running = null; // the AbortController of the search that runs
let terms = []; // of the query that is shown
let kinds = new Map(); // id -> "own", "expanded" or "feedback"
let shownQuery = { text: "", tokens: [] }; // the query of the results, with its tokens for late interaction

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function number(value) {
  return Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(Math.abs(value) >= 10 ? 1 : 3);
}

/** What the service, and not this script, failed at; its message is for the user. */
class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path, body, signal) {
  const headers = { accept: "application/json" };
  if (body) headers["content-type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal };
  if (body) options.body = JSON.stringify(body);
  const { reply, content } = await request(path, options, (received) => received.text());
  const answer = parsed(content, reply.status);
  if (reply.ok) return answer;
  throw failure(answer, reply.status);
}

/** Sends a request with the key of the server, if there is one; `read` reads the content of the reply. */
async function request(path, options, read) {
  if ($("key").value) options.headers.authorization = "Bearer " + $("key").value;
  try {
    const reply = await fetch(path, options);
    return { reply, content: await read(reply) };
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServiceError("The service does not answer.");
  }
}

function parsed(text, status) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new ServiceError(`The service answered ${status}, and not in JSON.`, status);
  }
}

function failure(answer, status) {
  return new ServiceError((answer && answer.error) || `The service answered ${status}.`, status);
}

/** The address of an image that was loaded with the key of the server, which an address in `src` would not carry. */
async function loadImage(path, parameters) {
  const address = `${path.replace(/^\//, "")}?${new URLSearchParams(parameters)}`;
  const options = { method: "GET", headers: { accept: "image/jpeg" } };
  const { reply, content } = await request(address, options, (received) => received.blob());
  if (!reply.ok) throw failure(parsed(await content.text(), reply.status), reply.status);
  return URL.createObjectURL(content);
}

function showImage(target, address) {
  if (target.src.startsWith("blob:")) URL.revokeObjectURL(target.src);
  target.src = address;
}

// ---- text with marks -------------------------------------------------------------------------------------------

function kindOf(term) {
  return term.feedback ? "feedback" : term.expanded ? "expanded" : "own";
}

/** Text whose marked tokens, if any, say their weight; places are code points. `byId` gives {part, label, kind}. */
function marked(target, text, marks = [], byId, limit) {
  const characters = Array.from(text);
  const end = limit === undefined ? characters.length : Math.min(limit, characters.length);
  let at = 0;
  for (const [start, stop, id] of marks) {
    const term = byId.get(id);
    if (!term || start < at || stop > end) continue;
    target.append(characters.slice(at, start).join(""));
    const mark = element("mark", term.kind, characters.slice(start, stop).join(""));
    mark.title = term.label;
    mark.dataset.term = id;
    mark.style.setProperty("--part", term.part);
    target.append(mark);
    at = stop;
  }
  target.append(characters.slice(at, end).join(""));
  return end < characters.length;
}

// ---- the query -------------------------------------------------------------------------------------------------

function showQuery(query) {
  shownQuery = { text: query.text, tokens: query.tokens || [] };
  terms = query.terms || [];
  kinds = new Map(terms.map((term) => [term.id, kindOf(term)]));
  $("vector").hidden = terms.length === 0;
  if (!terms.length) return;
  const heaviest = terms[0].weight;
  const byId = new Map(terms.map((term) => [term.id, {
    part: term.weight / heaviest, label: `${term.term}: ${number(term.weight)}`, kind: kinds.get(term.id),
  }]));
  $("query-text").replaceChildren();
  marked($("query-text"), query.text, query.marks, byId);
  $("legend-documents").hidden = !index;
  $("legend-feedback").hidden = !terms.some((term) => term.feedback);
  showBars(FIRST_TERMS);
}

function showBars(count) {
  const heaviest = terms[0].weight;
  $("bars").replaceChildren(...terms.slice(0, count).map((term) => {
    const row = element("li", kinds.get(term.id));
    row.dataset.term = term.id;
    row.title = `${term.term}: ${number(term.weight)}`;
    const bar = element("span", "bar");
    bar.style.setProperty("--part", term.weight / heaviest);
    row.append(element("span", "name", term.term), bar, element("span", "number", number(term.weight)));
    return row;
  }));
  $("more-terms").hidden = count >= terms.length;
  $("more-terms").textContent = `All ${terms.length} terms`;
}

// ---- the results -----------------------------------------------------------------------------------------------

function showResult(found) {
  const item = element("li");
  const card = element("article");
  card.tabIndex = 0;
  card.id = "result-" + found.rank;
  card.dataset.document = found.docid;
  const top = element("div", "top");
  const doc = found.doc || {};
  // Not every index explains itself.
  const { terms: shared = [], stages = {}, marks = {}, matches = [] } = found.explanation || {};
  const strongest = Math.max(...shared.map((term) => term.contribution), 1e-9);
  const byId = new Map(shared.map((term) => [term.id, {
    part: term.contribution / strongest,
    label: `${term.term}: ${number(term.contribution)}` + share(term),
    kind: kinds.get(term.id) || "expanded",
  }]));
  const title = element("h3");
  title.append(`${found.rank}. `);
  marked(title, doc.title || found.docid, doc.title ? marks.title : [], byId);
  top.append(title, element("span", "score", number(found.score)));
  card.append(top);
  const place = found.passage ? `passage ${found.passage.number}` : "";
  if (doc.title || place) card.append(element("div", "id", [doc.title && found.docid, place].filter(Boolean).join(", ")));
  const text = found.passage ? found.passage.text : doc.text;
  if (text) card.append(...textOf(text, marks.text, byId));
  if (found.image) card.append(thumbnailOf(found));
  if (shared.length) card.append(termsOf(shared));
  if (matches.length) card.append(matchesOf(matches));
  if (Object.keys(stages).length > 1) card.append(stagesOf(stages));
  item.append(card);
  return item;
}

function share(term) {
  return term.share === undefined ? "" : `, ${(100 * term.share).toFixed(0)}% of the score`;
}

function textOf(text, marks, byId) {
  const shown = element("p", "text");
  if (!marked(shown, text, marks, byId, FIRST_CHARACTERS)) return [shown];
  shown.append(" …");
  const button = element("button", "whole", "Whole text");
  button.type = "button";
  button.addEventListener("click", () => {
    shown.replaceChildren();
    marked(shown, text, marks, byId);
    button.remove();
  });
  return [shown, button];
}

/** Colours are those of the query's terms; a dashed border says that the document does not contain the word. */
function termsOf(found) {
  const list = element("ul", "terms");
  list.setAttribute("aria-label", "Matched terms");
  for (const term of found.slice(0, 12)) {
    const part = term.share === undefined ? number(term.contribution) : `${(100 * term.share).toFixed(0)}%`;
    const entry = element("li", kinds.get(term.id) || "expanded", `${term.term} ${part}`);
    if (term.expanded) entry.classList.add("unwritten");
    entry.title = `${number(term.contribution)}${share(term)}` + (term.expanded ? "; the model added it to the document" : "");
    entry.dataset.term = term.id;
    list.append(entry);
  }
  if (found.length > 12) list.append(element("li", "", `and ${found.length - 12} more`));
  return list;
}

/** For each word of the query, the token of the document that late interaction has matched it with. */
function matchesOf(matches) {
  const list = element("ul", "terms");
  list.setAttribute("aria-label", "Matched tokens");
  const words = matches.filter((match) => match.content);
  for (const match of (words.length ? words : matches).slice(0, FIRST_MATCHES)) {
    const entry = element("li", "", `${match.query_token} → ${match.document_token} ${match.similarity.toFixed(2)}`);
    entry.title = `The token of the document that is most similar to ${match.query_token}`;
    list.append(entry);
  }
  return list;
}

// ---- pages -----------------------------------------------------------------------------------------------------

function thumbnailOf(found) {
  const button = element("button", "thumbnail");
  button.type = "button";
  const picture = element("img");
  picture.alt = `Page ${found.docid}`;
  button.append(picture);
  button.addEventListener("click", () => openViewer(found));
  loadImage(found.image, { width: THUMBNAIL_WIDTH }).then(
    (address) => showImage(picture, address),
    (error) => button.replaceChildren(reason(error)),
  );
  return button;
}

/** Shows a page with its heat map, and a button for each word of the query. */
function openViewer(found) {
  const { text, tokens } = shownQuery;
  const views = [{ label: "Page", parameters: {} }];
  if (index.features.explain) views.unshift({ label: "Heat map", parameters: { query: text } });
  tokens.forEach((token, position) => {
    if (token.content) views.push({ label: token.token, parameters: { query: text, token: position } });
  });
  $("viewer-title").textContent = found.docid;
  $("viewer-image").alt = `Page ${found.docid}`;
  const buttons = views.map((view) => {
    const button = element("button", "", view.label);
    button.type = "button";
    button.addEventListener("click", () => show(view, button));
    return button;
  });
  let latest = null;
  async function show(view, pressed) {
    latest = view;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === pressed));
    $("viewer-status").textContent = "Loading …";
    try {
      const address = await loadImage(found.image, { width: VIEWER_WIDTH, ...view.parameters });
      if (latest !== view || $("viewer-title").textContent !== found.docid) return;
      showImage($("viewer-image"), address);
      $("viewer-status").textContent = "";
    } catch (error) {
      $("viewer-status").textContent = reason(error);
    }
  }
  $("viewer-tokens").replaceChildren(...buttons);
  $("viewer-image").removeAttribute("src");
  $("viewer").showModal();
  show(views[0], buttons[0]);
}

function stagesOf(stages) {
  const table = element("table", "stages");
  const head = element("tr");
  const row = element("tr");
  for (const [name, label] of Object.entries(STAGES)) {
    if (!stages[name]) continue;
    const cell = element("th", "", label);
    cell.scope = "col";
    head.append(cell);
    row.append(element("td", "", `#${stages[name].rank}, ${number(stages[name].score)}`));
  }
  table.append(head, row);
  return table;
}

/** A column for each method; where a document is among the results, its name leads there. */
function showColumns(columns, candidates) {
  const names = Object.keys(STAGES).filter((name) => columns[name]);
  $("beside").hidden = names.length === 0;
  const places = new Map(candidates.map((found) => [found.docid, found.rank]));
  $("rankings").replaceChildren(...names.map((stage) => {
    const column = element("section");
    const title = element("h3", "", STAGES[stage]);
    title.id = "column-" + stage;
    column.setAttribute("aria-labelledby", title.id);
    const list = element("ol");
    list.append(...columns[stage].map((found) => entryOf(found, places.get(found.docid))));
    column.append(title, list);
    return column;
  }));
}

function entryOf(found, place) {
  const entry = element("li");
  const name = element(place ? "a" : "span", "name", `${found.rank}. ${found.title || found.docid}`);
  if (place) name.href = "#result-" + place;
  name.title = found.docid;
  entry.dataset.document = found.docid;
  entry.append(name, element("span", "number", number(found.score)));
  return entry;
}

// ---- searching -------------------------------------------------------------------------------------------------

function say(text) {
  $("status").textContent = text;
}

async function search() {
  const query = $("query").value.trim();
  if (!query) return;
  if (running) running.abort();
  const mine = running = new AbortController();
  history.replaceState(null, "", "?q=" + encodeURIComponent(query));
  say("Searching …");
  const began = performance.now();
  try {
    if (!index) await describe();
    const answer = index ? await searchIndex(query, mine.signal) : await encodeOnly(query, mine.signal);
    if (mine.signal.aborted) return;
    $("key-row").hidden = true;
    showQuery(answer.query);
    showColumns(answer.columns || {}, answer.candidates);
    $("results").replaceChildren(...answer.candidates.map(showResult));
    say(summary(answer, performance.now() - began));
  } catch (error) {
    if (error.name === "AbortError") return;
    askForKey(error);
    $("results").replaceChildren();
    $("vector").hidden = $("beside").hidden = true;
    say(reason(error));
  }
}

/** Why something failed. What is no error of the service is one of this script: the console has its place. */
function reason(error) {
  if (error instanceof ServiceError) return error.message;
  console.error(error);
  return `This page failed, not the service: ${error.message}`;
}

function askForKey(error) {
  if (error.status !== 401) return;
  $("key-row").hidden = false;
  $("key").focus();
}

function searchIndex(query, signal) {
  const body = { query, hits: Number($("hits").value), explain: index.features.explain };
  for (const name of ["fusion", "prf", "rerank"]) {
    if (index.features[name] && $(name).checked) body[name] = true;
  }
  if ($("columns").checked) body.columns = true;
  return ask(`v1/${encodeURIComponent(index.name)}/search`, body, signal);
}

async function encodeOnly(query, signal) {
  const began = performance.now();
  const [row] = await ask("query/embed_sparse", { inputs: query, tokens: true }, signal);
  const [tokens] = await ask("tokenize", { inputs: query, offsets: "characters" }, signal);
  const own = new Set(tokens.map((token) => token.id));
  const special = new Set(tokens.filter((token) => token.special).map((token) => token.id));
  const found = row.filter((entry) => !special.has(entry.index)).sort((a, b) => b.value - a.value).map((entry) => ({
    id: entry.index, term: entry.token, weight: entry.value, expanded: !own.has(entry.index), feedback: false,
  }));
  const marks = tokens.filter((token) => !token.special).map((token) => [token.start, token.stop, token.id]);
  return { query: { text: query, terms: found, marks }, candidates: [], milliseconds: { encode: performance.now() - began } };
}

function summary(answer, total) {
  const parts = [];
  if (index) parts.push(answer.candidates.length === 1 ? "1 result" : `${answer.candidates.length || "no"} results`);
  const named = { encode: "encoding", search: "search", rerank: "late interaction", explain: "explanations" };
  for (const [name, value] of Object.entries(answer.milliseconds || {})) {
    parts.push(`${named[name] || name} ${value.toFixed(1)} ms`);
  }
  parts.push(`${total.toFixed(0)} ms in all`);
  return parts.join(" · ");
}

async function describe() {
  const { indexes } = await ask("v1/indexes");
  index = indexes[0] || null;
  $("options").hidden = !index;
  if (index) {
    $("about").textContent = `${index.name}: ${index.documents.toLocaleString("en")} documents, ${index.backend} index`;
    for (const name of ["fusion", "prf", "rerank"]) $("for-" + name).hidden = !index.features[name];
    $("for-columns").hidden = !COMPARED.some((name) => index.features[name]);
    const lacks = !index.features.explain && index.backend !== "bm25";
    $("hint").hidden = !lacks;
    let option = "terms are shown where the server is started with --vectors";
    if (index.backend === "late") option = "tokens are shown where the server is started with --data, and the index was built without --pool-factor";
    if (lacks) $("hint").textContent = `Matched ${option}.`;
    return;
  }
  const info = await ask("info");
  $("about").textContent = `${info.model_id}: vectors alone, without an index`;
  $("go").textContent = "Encode";
}

// ---- hovering and keys -----------------------------------------------------------------------------------------

function sameTerm(event) {
  same("term", event);
  if (!$("beside").hidden) same("document", event);
}

function same(kind, event) {
  const over = event.target.closest ? event.target.closest(`[data-${kind}]`) : null;
  const id = over ? over.dataset[kind] : null;
  for (const each of document.querySelectorAll(`[data-${kind}]`)) each.classList.toggle("same", each.dataset[kind] === id);
}

function keys(event) {
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "/" && !typing) {
    event.preventDefault();
    $("query").focus();
    $("query").select();
  } else if ((event.key === "j" || event.key === "k") && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    const cards = Array.from(document.querySelectorAll("#results article"));
    const at = cards.indexOf(document.activeElement.closest("article")) + (event.key === "j" ? 1 : -1);
    if (cards[at]) cards[at].focus();
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  search();
});
$("options").addEventListener("change", search);
$("more-terms").addEventListener("click", () => showBars(terms.length));
$("viewer-close").addEventListener("click", () => $("viewer").close());
document.addEventListener("mouseover", sameTerm);
document.addEventListener("keydown", keys);
$("query").value = new URLSearchParams(location.search).get("q") || "";
if ($("query").value) {
  search();
} else {
  describe().catch((error) => {
    $("about").textContent = error.status === 401 ? "This server asks for a key." : reason(error);
    askForKey(error);
  });
}
