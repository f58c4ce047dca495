// The explorer: choose an anchor, move the sliders, see its negatives under two settings, and mark false ones.
// Text from the data is only ever set as textContent.

// Control characters, marks of writing direction and lone surrogates, which are shown as escape sequences.
const INVISIBLE = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]/gu;
const escaped = (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;
const ROWS = 20;  // candidates of the table at first
const explorers = [];
for (const root of document.querySelectorAll("[data-explorer]")) {
  explorers.push(makeExplorer(root, JSON.parse(root.nextElementSibling.textContent)));
}
globalThis.hardneg = { negatives, ascendingOrder, pythonLine, settingError, UNIFORM, RULES, explorers };

// base64 of little-endian float32 or float16 → Float32Array
function decodeFloats(text, dtype) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  if (dtype === "float32") return Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
  const value = (bits) => {
    const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : (2 ** -14 * fraction) / 1024);
  };
  const table = Float32Array.from({ length: 65536 }, (_, bits) => value(bits));
  return Float32Array.from({ length: bytes.length / 2 }, (_, i) => table[view.getUint16(2 * i, true)]);
}

function inverseNorms(rows, dim) {
  const found = new Float64Array(rows.length / dim);
  for (let row = 0; row < found.length; row++) {
    let sum = 0;
    for (let at = row * dim; at < (row + 1) * dim; at++) sum += rows[at] * rows[at];
    found[row] = sum > 0 ? 1 / Math.sqrt(sum) : 0;  // a zero vector stays zero
  }
  return found;
}

function makeExplorer(root, data) {
  const part = (name) => root.querySelector(`[data-${name}]`);
  const make = (tag, options = {}, ...children) => {
    const { dataset, ...properties } = options;
    const element = Object.assign(document.createElement(tag), properties);
    Object.assign(element.dataset, dataset);
    element.append(...children);
    return element;
  };
  const percent = (value) => (value === 0 ? "0" : value < 0.00005 ? "<0.01 %" : `${(100 * value).toFixed(2)} %`);
  const short = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(5))) : "–");

  // The stored values
  const { count, dim } = data;
  const ids = data.ids.map((text) => String(JSON.parse(text)).replace(INVISIBLE, escaped));
  const labels = data.labels ?? new Array(count).fill(-1);
  const className = (row) => (labels[row] < 0 ? "unknown" : data.classes[labels[row]] ?? String(labels[row]));
  const stored = (text) => {
    const rows = decodeFloats(text, data.dtype);
    return { rows, inverse: inverseNorms(rows, dim) };
  };
  const checkpoints = data.checkpoints.map(({ name, features, positives }) => ({ name, positives, ...stored(features) }));
  const drawnRank = new Uint32Array(count);
  data.order.forEach((row, rank) => { drawnRank[row] = rank; });

  const cosinesOf = (anchor, checkpoint = 0) => {
    const { rows, inverse } = checkpoints[checkpoint];
    const own = rows.subarray(anchor * dim, (anchor + 1) * dim);
    return Float64Array.from({ length: count }, (_, row) => {
      let sum = 0;
      for (let at = 0; at < dim; at++) sum += own[at] * rows[row * dim + at];
      return sum * inverse[anchor] * inverse[row];
    });
  };
  const positiveOf = (anchor, checkpoint = 0) => checkpoints[checkpoint].positives?.[anchor] ?? state.positive;

  const pairKey = (one, other) => (one < other ? `${one},${other}` : `${other},${one}`);
  const decisions = new Map();  // pair → "drop" or "keep"
  const history = [];
  const masksOf = (anchor, setting) => {
    const masks = { own: anchor, drawn: new Uint8Array(count), marked: new Uint8Array(count), same: new Uint8Array(count) };
    const own = drawnRank[anchor];
    for (let row = 0; row < count; row++) {
      // The first samples of a fixed random order, without the anchor: as a batch that was drawn once.
      masks.drawn[row] = drawnRank[row] - (drawnRank[row] > own ? 1 : 0) < setting.candidates ? 1 : 0;
      masks.same[row] = labels[anchor] >= 0 && labels[row] === labels[anchor] ? 1 : 0;
    }
    for (const [key, decision] of decisions) {
      const [one, other] = key.split(",").map(Number);
      if (decision === "drop" && one === anchor) masks.marked[other] = 1;
      if (decision === "drop" && other === anchor) masks.marked[one] = 1;
    }
    return masks;
  };
  // The last cosines by checkpoint: a slider does not change them.
  const ranked = new Map();
  const rankedOf = (anchor, checkpoint) => {
    if (ranked.get(checkpoint)?.anchor !== anchor) {
      const cosines = cosinesOf(anchor, checkpoint);
      ranked.set(checkpoint, { anchor, cosines, ascending: ascendingOrder(cosines) });
    }
    return ranked.get(checkpoint);
  };
  // All numbers of an anchor under a setting.
  const compute = (anchor, setting, checkpoint = 0) => {
    const cosines = cosinesOf(anchor, checkpoint);
    return negatives(cosines, ascendingOrder(cosines), positiveOf(anchor, checkpoint), masksOf(anchor, setting), setting);
  };

  const initial = (given) => ({ ...UNIFORM, candidates: Math.max(1, count - 1), ...given });
  const state = {
    anchor: data.order[0],
    checkpoint: 0,
    positive: data.positive,
    settings: { A: initial(data.setting), B: initial(data.settingB) },
    first: 0,  // of the listed samples
    rows: ROWS,  // candidates shown
    pair: 0,
    milliseconds: 0,
  };

  // A sample as it is shown: image, text, or number
  const picture = (row, size) => {
    if (data.thumbnails !== null) {
      return make("img", { src: data.thumbnails[row], alt: "", width: size, height: size });
    }
    return make("bdi", { className: "x-text", textContent: data.texts === null ? `#${ids[row]}` : data.texts[row] });
  };
  const named = (row) => {
    const text = data.texts === null ? "" : `: ${data.texts[row].slice(0, 80)}`;
    return `${ids[row]}${labels[row] < 0 ? "" : `, label ${className(row)}`}${text}`;
  };
  const caption = (row) => {
    const found = [make("bdi", { textContent: ids[row] })];
    if (data.labels !== null) found.push(" ", make("bdi", { className: "tag x-class", textContent: className(row) }));
    if (data.thumbnails !== null && data.texts !== null) found.push(" ", make("bdi", { textContent: data.texts[row] }));
    return make("span", { className: "x-caption" }, ...found);
  };
  const sampleButton = (row, size = 44) => {
    const button = make("button", { type: "button", className: data.thumbnails === null ? "x-sample x-of-text" : "x-sample" }, picture(row, size), caption(row));
    button.setAttribute("aria-label", `Make ${named(row)} the anchor`);
    button.addEventListener("click", () => choose(row));
    return button;
  };

  // The list of samples
  let listed = data.order;
  const showSamples = () => {
    const shown = listed.slice(state.first, state.first + 24);
    part("samples").replaceChildren(...shown.map((row) => {
      const button = sampleButton(row);
      button.setAttribute("aria-pressed", String(row === state.anchor));
      return make("li", {}, button);
    }));
    const last = state.first + shown.length;
    part("range").textContent = listed.length ? `${state.first + 1}–${last} of ${listed.length}` : "nothing found";
    part("earlier").disabled = state.first === 0;
    part("later").disabled = last >= listed.length;
  };
  part("search").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    listed = data.order.filter((row) => !wanted || ids[row].toLowerCase() === wanted ||
      (data.labels !== null && className(row).toLowerCase() === wanted) ||
      (data.texts !== null && data.texts[row].toLowerCase().includes(wanted)));
    state.first = 0;
    showSamples();
  });
  part("earlier").addEventListener("click", () => { state.first = Math.max(0, state.first - 24); showSamples(); });
  part("later").addEventListener("click", () => { state.first += 24; showSamples(); });

  // The map
  const canvas = part("map");
  const spread = (axis) => {
    const values = data.map.map((point) => point[axis]);
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    return [low, high > low ? high - low : 1];
  };
  const [[left, width], [bottom, height]] = [spread(0), spread(1)];
  const places = data.map.map(([x, y]) => [
    12 + ((x - left) / width) * (canvas.width - 24),
    canvas.height - 12 - ((y - bottom) / height) * (canvas.height - 24),
  ]);
  const drawMap = (result) => {
    const context = canvas.getContext("2d");
    const style = getComputedStyle(root);
    const color = (name) => style.getPropertyValue(name).trim();
    const palette = Array.from({ length: 16 }, (_, number) => color(`--c${number}`));
    const muted = color("--muted");
    context.clearRect(0, 0, canvas.width, canvas.height);
    const largest = result.weight.reduce((a, b) => Math.max(a, b), 0);
    for (const negative of [false, true]) {
      for (let row = 0; row < count; row++) {
        if ((result.rule[row] === NEGATIVE) !== negative) continue;
        const [x, y] = places[row];
        context.globalAlpha = negative ? 0.25 + 0.75 * Math.sqrt(result.weight[row] / largest) : 0.18;
        context.fillStyle = labels[row] < 0 ? muted : palette[labels[row] % 16];
        const size = negative ? 1.5 + 2 * Math.sqrt(result.weight[row] / largest) : 1.5;
        context.fillRect(x - size, y - size, 2 * size, 2 * size);
      }
    }
    context.globalAlpha = 1;
    const [x, y] = places[state.anchor];
    context.lineWidth = 2.5;
    context.strokeStyle = color("--ink");
    context.beginPath();
    context.arc(x, y, 8, 0, 7);
    context.stroke();
    canvas.setAttribute("aria-label", `Map of the samples. The anchor is ${named(state.anchor)}. Arrow keys choose the nearest sample in a direction.`);
  };
  const nearest = (x, y, allowed) => {
    let [best, distance] = [-1, Infinity];
    for (let row = 0; row < count; row++) {
      const [px, py] = places[row];
      const found = (px - x) ** 2 + (py - y) ** 2;
      if (found < distance && allowed(px - x, py - y, row)) [best, distance] = [row, found];
    }
    return best;
  };
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    choose(nearest(x * canvas.width, y * canvas.height, () => true));
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const inDirection = (dx, dy, row) =>
      row !== state.anchor && dx * step[0] + dy * step[1] > Math.abs(dx * step[1] + dy * step[0]);
    const found = nearest(...places[state.anchor], inDirection);
    if (found >= 0) choose(found);
  });
  part("map-caption").textContent = data.mapCaption;

  // Sliders with number inputs
  const control = (id, title, low, high, step, get, set) => {
    const slider = make("input", { type: "range", min: low, max: high, step, id: `x-${id}` });
    const box = make("input", { type: "number", min: low, max: high, step: "any", dataset: { setting: id } });
    box.setAttribute("aria-label", `${title}, as a number`);
    const write = () => {
      slider.value = get();
      if (document.activeElement !== box || Number(box.value) !== get()) box.value = get();
    };
    const change = (source) => {
      if (source.value === "") return;
      const before = get();
      set(Number(source.value));
      const fault = Object.values(state.settings).map(settingError).find((text) => text);
      if (fault) set(before);
      box.setCustomValidity(fault ?? "");
      box.toggleAttribute("aria-invalid", Boolean(fault));
      problem.textContent = fault ?? "";
      if (!fault) {
        for (const other of [slider, box]) if (other !== source) other.value = get();
      } else if (source === slider) write();
      update();
    };
    slider.addEventListener("input", () => change(slider));
    box.addEventListener("input", () => change(box));
    const problem = make("span", { className: "x-problem" });
    problem.setAttribute("role", "alert");
    write();
    const label = make("label", { textContent: title });
    label.htmlFor = slider.id;
    return make("div", { className: "x-control" }, label, slider, box, problem);
  };
  for (const name of ["A", "B"]) {
    const setting = state.settings[name];
    const slider = (key, title, low, high, step) =>
      control(`${name}-${key}`, title, low, high, step, () => setting[key], (value) => { setting[key] = value; });
    const limit = make("select", { dataset: { setting: `${name}-limit` } },
      ...[["off", "no limit"], ["margin", "positive − margin"], ["relative", "share of the positive"]].map(
        ([value, textContent]) => make("option", { value, textContent, selected: value === setting.limit })));
    const margin = slider("margin", "margin below the positive (cosine)", 0, 1, 0.01);
    const relative = slider("relative", "share of the positive's score", 0.01, 1, 0.01);
    const showLimits = () => {
      margin.hidden = setting.limit !== "margin";
      relative.hidden = setting.limit !== "relative";
    };
    limit.addEventListener("change", () => { setting.limit = limit.value; showLimits(); update(); });
    showLimits();
    const withLabels = make("input", { type: "checkbox", checked: setting.labels, dataset: { setting: `${name}-labels` } });
    withLabels.disabled = data.labels === null;
    withLabels.addEventListener("change", () => { setting.labels = withLabels.checked; update(); });
    const line = make("code", { dataset: { line: name } });
    const copy = make("button", { type: "button", textContent: "Copy" });
    copy.setAttribute("aria-label", `Copy setting ${name} as Python`);
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(line.textContent);
        copy.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(line);
        copy.textContent = "Selected: press Ctrl+C";
      }
    });
    part("settings").append(make("fieldset", { className: `x-setting x-${name}` },
      make("legend", { textContent: `Setting ${name}` }),
      slider("temperature", "temperature t", 0.01, 1, 0.01),
      slider("beta", "tilt β", 0, 10, 0.1),
      slider("prior", "class prior τ⁺", 0, 0.5, 0.005),
      slider("lower", "ring from percentile", 0, 0.999, 0.001),
      slider("upper", "ring to percentile", 0.001, 1, 0.001),
      slider("threshold", "lowest cosine (−1: none)", -1, 1, 0.01),
      make("div", { className: "x-control" }, make("label", {}, "highest score ", limit)),
      margin, relative,
      slider("candidates", "number of candidates", 1, Math.max(1, count - 1), 1),
      make("div", { className: "x-control" },
        make("label", {}, withLabels, data.labels === null ? " leave out the anchor's label (no labels given)" : " leave out the anchor's label")),
      make("p", { className: "x-line" }, line, " ", copy)));
  }
  const shared = part("shared");
  if (checkpoints.length > 1) {
    const select = make("select", { dataset: { setting: "checkpoint" } },
      ...checkpoints.map(({ name }, number) => make("option", { value: number, textContent: name })));
    select.addEventListener("change", () => { state.checkpoint = Number(select.value); update(); });
    shared.append(make("label", {}, `${data.checkpointWord} `, select));
  }
  if (checkpoints.some(({ positives }) => positives === null)) {
    shared.append(control("positive", "cosine of the positive, where none is given", -1, 1, 0.01,
      () => state.positive, (value) => { state.positive = Math.max(-1, Math.min(1, value)); }));
  }

  // Numbers of the anchor
  const falseNegatives = (result) => {
    let [number, weight, share] = [0, 0, 0];
    for (let row = 0; row < count; row++) {
      if (result.rule[row] !== NEGATIVE || labels[state.anchor] < 0 || labels[row] !== labels[state.anchor]) continue;
      number += 1;
      weight += result.weight[row];
      share += result.share[row];
    }
    return { number, weight, share };
  };
  const showNumbers = (results, positive) => {
    const rows = [
      ["loss of the anchor", (result) => short(result.loss)],
      ["negatives (support)", (result) => String(result.support)],
      ["effective number of negatives", (result) => short(result.effective)],
      ["R, mean of eˢ under q", (result) => short(result.R)],
      ["G, after debiasing", (result) => short(result.G)],
      ["floored: no gradient to negatives", (result) => (result.floored ? "yes" : "no")],
      ["cosine of the positive", () => short(positive)],
    ];
    if (data.labels !== null) {
      rows.push(["false negatives: of the anchor's label", (result) => {
        if (labels[state.anchor] < 0) return "unknown";
        const { number, weight, share } = falseNegatives(result);
        return `${number}; ${percent(weight)} of the weight, ${percent(share)} of the gradient`;
      }]);
    }
    part("numbers").replaceChildren(...rows.map(([title, value]) => {
      const head = make("th", { textContent: title });
      head.scope = "row";
      return make("tr", {}, head, ...results.map((result) => make("td", { textContent: value(result) })));
    }));
    part("status").textContent = results.map((result, number) =>
      `${"AB"[number]}: loss ${short(result.loss)}, ${result.support} negatives, effectively ${short(result.effective)}`).join("; ");
  };
  const showCheckpoints = () => {
    if (checkpoints.length < 2) return;
    const head = make("tr", {}, ...[data.checkpointWord, "loss A", "loss B", "effective A", "effective B", "false: gradient A", "false: gradient B"]
      .map((textContent) => { const cell = make("th", { textContent }); cell.scope = "col"; return cell; }));
    const rows = checkpoints.map(({ name }, number) => {
      const { cosines, ascending } = rankedOf(state.anchor, number);
      const results = ["A", "B"].map((which) => negatives(cosines, ascending, positiveOf(state.anchor, number),
        masksOf(state.anchor, state.settings[which]), state.settings[which]));
      const title = make("th", {}, make("bdi", { textContent: name }));
      title.scope = "row";
      const known = labels[state.anchor] >= 0;
      return make("tr", {}, title, ...[
        ...results.map((result) => short(result.loss)), ...results.map((result) => short(result.effective)),
        ...results.map((result) => (known ? percent(falseNegatives(result).share) : "–")),
      ].map((textContent) => make("td", { textContent })));
    });
    const caption = make("caption", { textContent: `The same anchor at each ${data.checkpointWord}` });
    const box = make("div", { className: "wide", tabIndex: 0 }, make("table", {}, caption, make("thead", {}, head), make("tbody", {}, ...rows)));
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", caption.textContent);
    part("checkpoints").replaceChildren(box);
  };

  // Charts: all candidates by cosine, and the share of the gradient of each bin, split by label
  const svgElement = (tag, attributes, text = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  };
  const BINS = 40;
  const showCharts = (results, cosines) => {
    let low = 1;
    for (let row = 0; row < count; row++) low = Math.min(low, cosines[row]);
    low = Math.min(low, 0.9);
    const bin = (cosine) => Math.max(0, Math.min(BINS - 1, Math.floor(((cosine - low) / (1 - low)) * BINS)));
    const all = new Float64Array(BINS);
    for (let row = 0; row < count; row++) if (row !== state.anchor) all[bin(cosines[row])] += 1;
    const shares = results.map((result) => {
      const found = [new Float64Array(BINS), new Float64Array(BINS)];
      for (let row = 0; row < count; row++) {
        const same = labels[row] >= 0 && labels[row] === labels[state.anchor];
        found[same ? 1 : 0][bin(cosines[row])] += result.share[row];
      }
      return found;
    });
    const most = all.reduce((a, b) => Math.max(a, b), 1);
    const largest = Math.max(1e-9, ...shares.flatMap(([other, same]) => [...other].map((value, at) => value + same[at])));
    part("charts").replaceChildren(...shares.map(([other, same], number) => {
      const plot = svgElement("svg", { viewBox: "0 0 340 150", class: "plot", role: "img",
        "aria-label": `Share of the gradient by cosine under setting ${"AB"[number]}` });
      const bar = (at, from, value, kind) => plot.append(svgElement("rect", {
        x: 8 + at * 8.1, y: 126 - 116 * (from + value), width: 7.3, height: Math.max(0, 116 * value), class: kind }));
      for (let at = 0; at < BINS; at++) {
        bar(at, 0, all[at] / most, "x-all");
        bar(at, 0, other[at] / largest, "x-other");
        bar(at, other[at] / largest, same[at] / largest, "x-same");
      }
      plot.append(svgElement("text", { x: 8, y: 142 }, low.toFixed(2)),
        svgElement("text", { x: 170, y: 142, class: "middle" }, "cosine"),
        svgElement("text", { x: 332, y: 142, class: "end" }, "1"));
      return make("figure", { className: "chart" }, make("figcaption", { textContent: `Setting ${"AB"[number]}: share of the gradient by cosine` },
        make("span", { textContent: `gray: all candidates; highest bar: ${percent(largest)} of the gradient` })), plot);
    }));
  };

  // The table of candidates
  const showCandidates = (results, cosines, ascending) => {
    const order = Array.from(ascending).reverse().filter((row) => row !== state.anchor);
    const by = part("order").value;
    if (by !== "cosine") {
      const values = results[by.endsWith("A") ? 0 : 1][by.slice(0, -1)];
      order.sort((one, other) => values[other] - values[one]);  // stable: ties by cosine
    }
    part("candidates").replaceChildren(...order.slice(0, state.rows).map((row) => {
      const known = labels[row] >= 0 && labels[state.anchor] >= 0;
      const same = known && labels[row] === labels[state.anchor];
      const head = make("th", {}, sampleButton(row, 40));
      head.scope = "row";
      const mark = make("button", { type: "button", textContent: "not a negative" });
      const key = pairKey(state.anchor, row);
      mark.setAttribute("aria-pressed", String(decisions.get(key) === "drop"));
      mark.setAttribute("aria-label", `Mark ${named(row)} as not a negative`);
      mark.addEventListener("click", () => decide(key, decisions.get(key) === "drop" ? undefined : "drop"));
      return make("tr", { className: same ? "x-is-same" : "", dataset: { row } }, head,
        make("td", { textContent: cosines[row].toFixed(4) }),
        make("td", { textContent: known ? (same ? "same" : "different") : "unknown" }),
        ...results.flatMap((result) => [
          make("td", { textContent: percent(result.weight[row]) }),
          make("td", { textContent: percent(result.share[row]) }),
          make("td", { className: "x-rule", textContent: RULES[result.rule[row]] }),
        ]),
        make("td", {}, mark));
    }));
    part("more").hidden = state.rows >= count - 1;
  };
  part("order").addEventListener("change", () => update());
  part("more").addEventListener("click", () => { state.rows += 2 * ROWS; update(); });

  // The queue
  const queue = () => data.suspects.filter(([one, other]) =>
    !(state.settings.A.labels && labels[one] >= 0 && labels[one] === labels[other]));
  const showPair = () => {
    const pairs = queue();
    state.pair = Math.max(0, Math.min(state.pair, pairs.length - 1));
    const box = part("pair");
    const done = pairs.filter(([one, other]) => decisions.has(pairKey(one, other))).length;
    const dropped = [...decisions.values()].filter((decision) => decision === "drop").length;
    part("progress").value = pairs.length ? done / pairs.length : 1;
    part("progress-text").textContent = `${done} of ${pairs.length} pairs reviewed; ${dropped} marked as not a negative`;
    for (const name of ["drop", "keep"]) part(name).disabled = !pairs.length;
    part("undo").disabled = !history.length;
    part("previous").disabled = state.pair === 0;
    part("next").disabled = state.pair >= pairs.length - 1;
    part("download").disabled = dropped === 0;
    if (!pairs.length) {
      box.replaceChildren(make("p", { textContent: "No pair is suspected." }));
      return;
    }
    const [one, other, score, reason] = pairs[state.pair];
    const decision = decisions.get(pairKey(one, other));
    box.replaceChildren(
      make("div", {}, picture(one, 96), caption(one)),
      make("div", {}, picture(other, 96), caption(other)),
      make("div", { className: "x-reason" },
        make("p", { textContent: `Pair ${state.pair + 1} of ${pairs.length}, score ${score.toFixed(3)}: ${reason}` }),
        make("p", { className: "x-decision", textContent: decision ? (decision === "drop" ? "not a negative" : "kept as a negative") : "not reviewed" })));
  };
  const decide = (key, decision) => {
    history.push([key, decisions.get(key)]);
    if (decision === undefined) decisions.delete(key);
    else decisions.set(key, decision);
    update();
  };
  const review = (decision) => {
    const pairs = queue();
    if (!pairs.length) return;
    const [one, other] = pairs[state.pair];
    const position = state.pair;
    state.pair = Math.min(position + 1, pairs.length - 1);
    decide(pairKey(one, other), decision);
  };
  const undo = () => {
    if (!history.length) return;
    const [key, before] = history.pop();
    if (before === undefined) decisions.delete(key);
    else decisions.set(key, before);
    const at = queue().findIndex(([one, other]) => pairKey(one, other) === key);
    if (at >= 0) state.pair = at;
    update();
  };
  const move = (step) => { state.pair += step; showPair(); };
  const actions = { d: () => review("drop"), k: () => review("keep"), u: undo, ArrowLeft: () => move(-1), ArrowRight: () => move(1) };
  part("queue").addEventListener("keydown", (event) => {
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
    // A button that has become disabled loses the focus: keep the keys working.
    if (!part("queue").contains(document.activeElement)) part("queue").focus();
  });
  part("drop").addEventListener("click", actions.d);
  part("keep").addEventListener("click", actions.k);
  part("undo").addEventListener("click", undo);
  part("previous").addEventListener("click", actions.ArrowLeft);
  part("next").addEventListener("click", actions.ArrowRight);
  const markedLines = () => [...decisions].filter(([, decision]) => decision === "drop").map(([key]) => {
    const [one, other] = key.split(",").map(Number);
    const of = data.fingerprint ? `, "data": ${JSON.stringify(data.fingerprint)}` : "";
    return `{"a": ${data.ids[one]}, "b": ${data.ids[other]}${of}}\n`;  // JSON already: ids may exceed the range of numbers here
  }).join("");
  part("download").addEventListener("click", () => {
    const link = make("a", { download: "not_negatives.jsonl" });
    link.href = URL.createObjectURL(new Blob([markedLines()], { type: "application/jsonl" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
  part("usable").textContent = data.usable;

  const showAnchor = () => {
    part("anchor").replaceChildren(make("p", { className: "small", textContent: "Anchor" }), picture(state.anchor, 96), caption(state.anchor));
  };
  const choose = (row) => {
    state.anchor = row;
    state.rows = ROWS;
    showAnchor();
    for (const button of part("samples").querySelectorAll("button")) button.setAttribute("aria-pressed", "false");
    showSamples();
    update();
  };
  const update = () => {
    const begun = performance.now();
    const { cosines, ascending } = rankedOf(state.anchor, state.checkpoint);
    const positive = positiveOf(state.anchor, state.checkpoint);
    const results = ["A", "B"].map((name) => {
      const setting = state.settings[name];
      root.querySelector(`[data-line="${name}"]`).textContent = pythonLine(setting);
      return negatives(cosines, ascending, positive, masksOf(state.anchor, setting), setting);
    });
    showNumbers(results, positive);
    showCheckpoints();
    showCharts(results, cosines);
    showCandidates(results, cosines, ascending);
    drawMap(results[0]);
    showPair();
    state.milliseconds = performance.now() - begun;
  };
  part("notes").replaceChildren(...data.notes.map((textContent) => make("p", { className: "note" }, make("bdi", { textContent }))));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => update());
  showSamples();
  showAnchor();
  update();
  return { data, state, decisions, compute, cosinesOf, positiveOf, choose, update, markedLines };
}
