// The instructor's page. It receives the room as server-sent events and draws it; learners' text is
// only ever set as textContent, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const ALL = "all";
const ROWS = 400; // learners in the table; the bars and the histogram include all of them

const room = { course: [], checks: [], learners: new Map(), predictions: {}, ends: null };
let clockAhead = 0; // seconds that the board's clock is ahead of ours
let drawn = ""; // the histogram's current content
let following = true; // show the lab and the prediction that the room works on, until one is chosen

// An element with its class, text and children.
function make(tag, kind = "", text = null, ...children) {
  const found = document.createElement(tag);
  if (kind) found.className = kind;
  if (text !== null) found.textContent = text;
  found.append(...children);
  return found;
}

const now = () => Date.now() / 1000 + clockAhead;
const time = (at) => at === null ? "" :
  new Date((at - clockAhead) * 1000).toLocaleTimeString("en-GB", {
    hour: "2-digit", minute: "2-digit",
  });
const alias = (learner) => $("names").getAttribute("aria-pressed") === "true"
  ? learner.shown : `learner ${learner.id}`;

// --- incoming events

function connect() {
  const source = new EventSource("events");
  source.addEventListener("class", (event) => {
    const { title, course } = JSON.parse(event.data);
    document.title = $("title").textContent = title;
    Object.assign(room, { course, checks: course.flatMap((part) => part.checks) });
    room.learners.clear();
    fill($("lab"), [[ALL, "all labs"], ...course.filter((part) => part.checks.length)
      .map((part) => [part.title, part.title])]);
  });
  source.addEventListener("room", (event) => {
    const news = JSON.parse(event.data);
    clockAhead = news.now - Date.now() / 1000;
    Object.assign(room, { ends: news.ends, predictions: news.predictions });
    for (const learner of news.learners) {
      if (learner.removed) room.learners.delete(learner.id);
      else room.learners.set(learner.id, learner);
    }
    nameAll();
    lost(false);
    trouble(news.warning);
    draw();
  });
  source.onerror = () => {
    lost(true);
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  };
}

function trouble(text) {
  $("trouble").hidden = !text;
  $("trouble").textContent = text;
}

function lost(yes) {
  document.body.dataset.connected = yes ? "no" : "yes";
  if (yes) trouble("The board does not answer. This page may be out of date; it will reconnect.");
}

// Learners with the same alias get numbers.
function nameAll() {
  const seen = new Map();
  for (const id of [...room.learners.keys()].sort((a, b) => a - b)) {
    const learner = room.learners.get(id);
    const count = (seen.get(learner.alias) ?? 0) + 1;
    seen.set(learner.alias, count);
    learner.shown = count > 1 ? `${learner.alias} (${count})` : learner.alias;
  }
}

// Options [value, text]; the current choice is kept.
function fill(select, options) {
  const signature = JSON.stringify(options);
  if (select.dataset.options === signature) return;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => {
    const option = make("option", "", text);
    option.value = value;
    return option;
  }));
  select.dataset.options = signature;
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

// --- drawing

function draw() {
  const learners = [...room.learners.values()].sort((a, b) => a.id - b.id);
  const tried = learners.reduce((sum, one) => sum + Object.keys(one.checks).length, 0);
  $("facts").textContent = `${learners.length} learners, ${tried} exercises begun`;
  follow(learners);
  drawHands(learners);
  drawShares(learners);
  drawGrid(learners);
  drawPredictions();
}

// The lab of the latest check, until the instructor has chosen one.
function follow(learners) {
  if (!following) return;
  let last = -1, place = 0;
  for (const learner of learners) {
    for (const [key, [, , at]] of Object.entries(learner.checks)) {
      if ((at ?? 0) > last) [last, place] = [at ?? 0, Number(key)];
    }
  }
  const part = room.course.find((one) => one.checks.includes(room.checks[place]));
  if (part) $("lab").value = part.title;
}

// [place, name] of the chosen lab's checks, or of all checks that have been tried.
function places() {
  const title = $("lab").value, found = [];
  for (const part of room.course) {
    const checks = part.checks.map((name) => [room.checks.indexOf(name), name]);
    const begun = () => [...room.learners.values()].some((learner) =>
      checks.some(([place]) => place in learner.checks));
    if (title === ALL ? begun() : title === part.title) found.push(...checks);
  }
  return found;
}

function drawHands(learners) {
  const asking = learners.filter((one) => one.help)
    .sort((a, b) => (a.help[1] ?? 0) - (b.help[1] ?? 0));
  $("hands").hidden = !asking.length;
  $("asking").replaceChildren(...asking.map((learner) => {
    const [question, at] = learner.help;
    const minutes = at === null ? "" : `${Math.max(0, Math.round((now() - at) / 60))} min`;
    const done = make("button", "", "helped");
    done.onclick = () => post("helped", { learner: learner.id });
    return make("li", "", null, make("b", "", alias(learner)), make("span", "", question),
      make("small", "", minutes), done);
  }));
}

// Symptoms that differ only in their numbers count as one.
function drawShares(learners) {
  const rows = [];
  for (const [place, name] of places()) {
    const said = learners.map((one) => one.checks[place]).filter(Boolean);
    const done = said.filter(([right]) => right).length;
    const open = said.filter(([right]) => !right);
    const bar = make("div", "share", null, make("i"), make("i"));
    const share = (count) => `${learners.length ? 100 * count / learners.length : 0}%`;
    bar.children[0].style.width = share(done);
    bar.children[1].style.width = share(open.length);
    const rest = learners.length - said.length;
    rows.push(make("div", "", name), bar, make("div", "count",
      `${done} done · ${open.length} tried · ${rest} not started`));
    const often = new Map();
    for (const [, , , symptom] of open) {
      const key = symptom.replace(/\d+/g, "#");
      often.set(key, [(often.get(key)?.[0] ?? 0) + 1, symptom]);
    }
    const [first] = [...often.values()].sort((a, b) => b[0] - a[0]);
    if (first && first[0] > 1 && $("lab").value !== ALL) {
      rows.push(make("div", "often", `${first[0]} × ${first[1]}`));
    }
  }
  $("shares").replaceChildren(...($("lab").value === ALL ? [] : rows));
}

// A row is replaced only when it differs, so that hovering and selection survive.
function drawGrid(learners) {
  const columns = places();
  const narrow = columns.length > 8;
  const shown = learners.slice(0, ROWS);
  $("grid").className = narrow ? "narrow" : "";
  $("grid").hidden = !learners.length;
  $("nobody").hidden = learners.length > 0 && learners.length <= ROWS;
  $("nobody").textContent = learners.length ? `${learners.length - ROWS} more are not drawn.` :
    "No one has joined yet.";
  const head = make("tr", "", null, make("th", "", "learner"),
    ...columns.map(([, name]) => make("th", "", name)));
  $("grid").tHead.replaceChildren(head);
  const body = $("grid").tBodies[0];
  while (body.rows.length > shown.length) body.lastElementChild.remove();
  shown.forEach((learner, i) => {
    const cells = columns.map(([place]) => learner.checks[place] ?? null);
    const signature = JSON.stringify([alias(learner), !!learner.help, narrow, columns, cells]);
    const before = body.rows[i];
    if (before?.dataset.signature === signature) return;
    const remove = make("button", "", "×"), name = alias(learner);
    remove.setAttribute("aria-label", remove.title = `remove ${name}`);
    remove.onclick = () => {
      if (confirm(`Remove ${name} from the board for good?`)) post("removed", { learner: learner.id });
    };
    const row = make("tr", learner.help ? "asks" : "", null, make("th", "", name, remove));
    row.dataset.signature = signature;
    columns.forEach(([, name], j) => row.append(cell(cells[j], name, narrow)));
    if (before) before.replaceWith(row);
    else body.append(row);
  });
}

function cell(said, name, narrow) {
  if (!said) return make("td", "none", "·");
  const [done, tries, at, symptom] = said;
  if (done) return make("td", "done", narrow ? "✓" : `✓ ${time(at)}`);
  const count = tries > 1 ? ` ${tries}×` : "";
  const found = make("td", "tried", narrow ? "✗" : `✗${count} ${time(at)}`,
    make("small", "", symptom));
  found.title = symptom;
  found.onclick = () => {
    $("symptom").firstElementChild.textContent = `${name}: ${symptom}`;
    $("symptom").showModal();
  };
  return found;
}

function drawPredictions() {
  const names = room.course.flatMap((part) => part.predictions)
    .filter((name) => room.predictions[name]);
  $("predictions").hidden = !names.length;
  fill($("prediction"), names.map((name) => [name, `${name} (${room.predictions[name]})`]));
  drawHistogram();
}

// Fetches it again when there are more values, and occasionally for the measurements.
async function drawHistogram() {
  const name = $("prediction").value, reveal = $("reveal").checked;
  const slot = reveal ? Math.floor(Date.now() / 3000) : 0;
  const wanted = JSON.stringify([name, reveal, slot, room.predictions[name]]);
  if (!name || drawn === wanted) return;
  drawn = wanted;
  try {
    const query = new URLSearchParams({ name, reveal: reveal ? "1" : "0" });
    const answer = await fetch(`histogram?${query}`);
    if (!answer.ok) throw new Error(answer.status);
    const found = await answer.json();
    if (drawn === wanted) show(found);
  } catch {
    drawn = "";
  }
}

function number(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e9 || size < 1e-3)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en");
}

function shape(tag, facts, text = null) {
  const found = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(facts)) found.setAttribute(name, value);
  if (text !== null) found.textContent = text;
  return found;
}

// Round numbers from `low` to `high`, up to about eight.
function ticks(low, high, log) {
  const found = [];
  if (log) {
    const decades = Math.log10(high / low), every = Math.ceil(decades / 8);
    const within = decades > 3 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 5];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every) {
      found.push(...within.map((digit) => Number(`${digit}e${power}`)));
    }
  } else {
    const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((digit) => digit * power >= rough);
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  }
  return found.filter((value) => value >= low && value <= high);
}

function show(data) {
  const left = 60, right = 1140, bottom = 320, top = 70;
  const { edges, bins, log } = data;
  const scale = log ? Math.log10 : (x) => x;
  const first = scale(edges[0]), last = scale(edges.at(-1));
  const x = (value) => left + (right - left) * (scale(value) - first) / (last - first);
  const most = Math.max(1, ...bins);
  const shapes = [], counts = []; // the counts are drawn above the lines
  bins.forEach((count, i) => {
    const height = (bottom - top) * count / most, begin = x(edges[i]);
    if (!count) return;
    shapes.push(shape("rect", { class: "bar", x: begin + 1, y: bottom - height,
      width: x(edges[i + 1]) - begin - 2, height }));
    counts.push(shape("text", { x: (begin + x(edges[i + 1])) / 2, y: bottom - height - 6,
      "text-anchor": "middle", class: most < 1000 ? "count" : "count small" }, count));
  });
  shapes.push(shape("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  for (const value of ticks(edges[0], edges.at(-1), log)) {
    const at = x(value);
    shapes.push(shape("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 8 }));
    shapes.push(shape("text", { x: at, y: bottom + 32, "text-anchor": "middle" }, number(value)));
  }
  const axis = `${data.unit}${log ? " (logarithmic)" : ""}`;
  shapes.push(shape("text", { x: right, y: bottom + 56, "text-anchor": "end", class: "muted" }, axis));
  const words = [`${number(data.count)} predictions`];
  if (data.median !== null) words.push(`median ${number(data.median)} ${data.unit}`);
  [["theory", "theory", 24], ["measured", "measured", 50]].forEach(([kind, word, y]) => {
    const said = data[kind];
    if (!said) return;
    const at = x(said.median), end = at > 900;
    if (kind === "measured" && said.count > 1) {
      const [low, high] = [said.low, said.high].map((value) =>
        Math.min(right, Math.max(left, log && value <= 0 ? left : x(value))));
      shapes.push(shape("rect", { class: kind, x: low, y: top - 14, width: Math.max(2, high - low),
        height: bottom - top + 14 }));
    }
    shapes.push(shape("line", { class: kind, x1: at, x2: at, y1: y + 4, y2: bottom }));
    const label = `${word} ${number(said.median)} ${data.unit}`;
    shapes.push(shape("text", { class: kind, x: end ? at - 8 : at + 8, y,
      "text-anchor": end ? "end" : "start" }, label));
    words.push(kind === "theory" ? label : `${label} (median of ${number(said.count)}; ` +
      `${said.count < 20 ? "" : "nine of ten "}from ${number(said.low)} to ${number(said.high)})`);
  });
  if (data.below + data.above) {
    words.push(`${data.below + data.above} are far off and not drawn`);
  }
  if (data.late) words.push(`${data.late} came after the reveal and do not count`);
  $("said").textContent = `${words.join(" · ")}`;
  $("histogram").replaceChildren(...shapes, ...counts);
}

// --- the instructor's actions

async function post(route, content) {
  try {
    const answer = await fetch(route, {
      method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify(content),
    });
    if (!answer.ok) trouble((await answer.json()).error);
  } catch {
    lost(true);
  }
}

function tick() {
  const seconds = room.ends === null ? null : room.ends - now();
  $("left").textContent = seconds === null ? "–" :
    seconds > 0 ? `${Math.ceil(seconds / 60)} min left` : "time is up";
  $("left").className = seconds !== null && seconds < 300 ? "over" : "";
}

$("clock").onsubmit = (event) => {
  event.preventDefault();
  const text = $("minutes").value;
  post("minutes", { minutes: text === "" ? null : Number(text) });
  $("minutes").value = "";
};
$("lab").onchange = () => { following = false; draw(); };
$("prediction").onchange = () => { $("reveal").checked = false; drawHistogram(); };
$("reveal").onchange = drawHistogram;
$("names").onclick = () => {
  const shown = $("names").getAttribute("aria-pressed") === "true";
  $("names").setAttribute("aria-pressed", String(!shown));
  draw();
};

const dark = matchMedia("(prefers-color-scheme: dark)");
function theme(choice) {
  document.documentElement.dataset.theme = choice ?? (dark.matches ? "dark" : "light");
}
$("theme").onclick = () => {
  const choice = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", choice);
  theme(choice);
};
dark.onchange = () => theme(localStorage.getItem("theme"));
theme(localStorage.getItem("theme"));
setInterval(tick, 500);
connect();
