// The negatives of one anchor, as hardneg computes them: mask · band · tilt, debiasing, the loss and its gradient.
// Pure functions without the page. tests/insight/explorer/test_page.py compares them with the library's reference in float64.

const RULES = [
  "",
  "own instance",
  "beyond the number of candidates",
  "marked as not a negative",
  "same label",
  "below the ring",
  "above the ring",
  "below the threshold",
  "above the limit below the positive",
];
const [NEGATIVE, OWN, BEYOND, MARKED, SAME_LABEL, BELOW_RING, ABOVE_RING, BELOW_THRESHOLD, ABOVE_LIMIT] = RULES.keys();

const UNIFORM = {
  temperature: 0.5,
  beta: 0,
  prior: 0,  // τ⁺
  lower: 0,  // of the ring
  upper: 1,
  threshold: -1,  // lowest cosine; −1 is no threshold
  limit: "off",  // "off", "margin" or "relative": the highest score, compared with the positive
  margin: 0.05,  // of the cosine, below the positive
  relative: 0.95,
  labels: false,  // leave out candidates of the anchor's label
  candidates: Infinity,  // how many samples the anchor is compared with
};

// What is wrong with a setting, or "" if the library accepts it.
function settingError(setting) {
  const between = (name, low, high) => {
    const value = setting[name];
    return Number.isFinite(value) && value >= low && value <= high ? "" : `${name} must be from ${low} to ${high}`;
  };
  const faults = [
    setting.temperature > 0 && Number.isFinite(setting.temperature) ? "" : "temperature must be above 0",
    setting.beta >= 0 && Number.isFinite(setting.beta) ? "" : "beta must be at least 0",
    setting.prior >= 0 && setting.prior < 1 ? "" : "the class prior must be at least 0 and below 1",
    between("lower", 0, 1),
    between("upper", 0, 1),
    setting.lower < setting.upper ? "" : "the ring's lower end must be below its upper end",
    between("threshold", -1, 1),
    Number.isFinite(setting.margin) ? "" : "margin must be a number",
    setting.relative > 0 && Number.isFinite(setting.relative) ? "" : "relative must be above 0",
    setting.candidates >= 1 ? "" : "the number of candidates must be at least 1",
  ];
  return faults.find((fault) => fault) ?? "";
}

// Rows in ascending order of their cosine, ties by row.
function ascendingOrder(cosines) {
  const order = Uint32Array.from(cosines.keys());
  return order.sort((one, other) => cosines[one] - cosines[other] || one - other);
}

// For each candidate the rule that drops it, or NEGATIVE.
// cosines: of the anchor with all samples · ascending: `ascendingOrder` of them · positive: cosine of the positive ·
// masks: {own: the anchor's row, drawn: 0/1 of each sample, marked: 0/1, same: 0/1, has the anchor's known label}
function droppedBy(cosines, ascending, positive, masks, setting) {
  const scale = 1 / setting.temperature;
  const rule = new Uint8Array(cosines.length);
  for (let row = 0; row < rule.length; row++) {
    if (row === masks.own) rule[row] = OWN;
    else if (!masks.drawn[row]) rule[row] = BEYOND;
    else if (masks.marked[row]) rule[row] = MARKED;
    else if (setting.labels && masks.same[row]) rule[row] = SAME_LABEL;
  }
  // The ring counts the ranks of what the masks have left; other bands come after it.
  const eligible = ascending.filter((row) => rule[row] === NEGATIVE);
  const start = Math.floor(setting.lower * eligible.length + 1e-9);
  const end = Math.max(Math.floor(setting.upper * eligible.length + 1e-9), start + 1);
  const lowest = setting.threshold > -1 ? setting.threshold / setting.temperature : -Infinity;
  const best = positive * scale;
  let highest = Infinity;
  if (setting.limit === "margin") highest = best - setting.margin / setting.temperature;
  if (setting.limit === "relative") highest = best - (1 - setting.relative) * Math.abs(best);
  highest += 8 * Number.EPSILON * scale;  // as the library: a copy of the positive compares as equal to it
  eligible.forEach((row, rank) => {
    const score = cosines[row] * scale;
    if (rank < start) rule[row] = BELOW_RING;
    else if (rank >= end) rule[row] = ABOVE_RING;
    else if (score < lowest) rule[row] = BELOW_THRESHOLD;
    else if (score > highest) rule[row] = ABOVE_LIMIT;
  });
  return rule;
}

// Weights, gradient and loss of an anchor. Arguments as of `droppedBy`.
// Returns rule, weight (q, sums to 1), gradient (∂L/∂s), share (of its absolute sum), and the numbers of the anchor;
// an anchor without negatives has loss 0 and gradient 0.
function negatives(cosines, ascending, positive, masks, setting) {
  const rule = droppedBy(cosines, ascending, positive, masks, setting);
  const weight = new Float64Array(rule.length);
  const gradient = new Float64Array(rule.length);
  const share = new Float64Array(rule.length);
  const kept = [];
  for (let row = 0; row < rule.length; row++) if (rule[row] === NEGATIVE) kept.push(row);
  const found = {
    rule, weight, gradient, share, support: kept.length,
    effective: 0, floored: false, R: NaN, G: NaN, loss: 0, positiveGradient: 0,
  };
  if (!kept.length) return found;
  const { beta, prior, temperature } = setting;
  const scale = 1 / temperature;
  let top = -Infinity;  // all exponents are taken relative to the highest score: nothing overflows
  for (const row of kept) top = Math.max(top, cosines[row] * scale);
  let [plain, tilted, squares] = [0, 0, 0];  // Σ e^{βs}, Σ e^{(β+1)s}, Σ e^{2βs}
  for (const row of kept) {
    const score = cosines[row] * scale - top;
    weight[row] = Math.exp(beta * score);
    gradient[row] = Math.exp((beta + 1) * score);
    plain += weight[row];
    tilted += gradient[row];
    squares += weight[row] ** 2;
  }
  const logR = Math.log(tilted) - Math.log(plain) + top;
  const best = positive * scale;
  let logG = logR;
  if (prior > 0) {
    // G = (R − τ⁺P)/(1 − τ⁺) with P = e^p, at least e^{−1/t}.
    const gap = Math.log(prior) + best - logR;
    logG = gap < 0 ? logR + Math.log(-Math.expm1(gap)) - Math.log1p(-prior) : -Infinity;
    found.floored = !(logG > -scale);
    if (found.floored) logG = -scale;
  }
  const logit = Math.log(kept.length) + logG - best;  // log(Q·G·e^{−p})
  found.loss = Math.max(logit, 0) + Math.log1p(Math.exp(-Math.abs(logit)));
  const sigma = 1 / (1 + Math.exp(-logit));
  const h = found.floored ? 0 : (sigma * Math.exp(logR - logG)) / (1 - prior);
  let total = 0;
  for (const row of kept) {
    weight[row] /= plain;
    gradient[row] = h * ((beta + 1) * (gradient[row] / tilted) - beta * weight[row]);
    total += Math.abs(gradient[row]);
  }
  if (total > 0) for (const row of kept) share[row] = Math.abs(gradient[row]) / total;
  found.positiveGradient = -sigma;
  if (prior > 0 && !found.floored) found.positiveGradient -= (sigma * prior * Math.exp(best - logG)) / (1 - prior);
  found.effective = (plain * plain) / squares;
  found.R = Math.exp(logR);
  found.G = Math.exp(logG);
  return found;
}

// The Python expression that makes a setting's loss.
function pythonLine(setting) {
  const number = (value) => String(value).replace(/^(-?\d+)$/, "$1.0").replace(/^(-?\d+)e/, "$1.0e");
  const parts = [];
  if (setting.lower > 0 || setting.upper < 1) parts.push(`hn.Ring(${number(setting.lower)}, ${number(setting.upper)})`);
  if (setting.threshold > -1) parts.push(`hn.Threshold(cosine=${number(setting.threshold)})`);
  if (setting.limit === "margin") {
    parts.push(`hn.BelowPositive(margin=${number(setting.margin / setting.temperature)})`);
  }
  if (setting.limit === "relative") parts.push(`hn.BelowPositive(relative=${number(setting.relative)})`);
  if (setting.beta > 0) parts.push(`hn.Exponential(${number(setting.beta)})`);
  const options = [`temperature=${number(setting.temperature)}`];
  if (parts.length) options.push(`hardening=${parts.length > 1 ? `(${parts.join(", ")})` : parts[0]}`);
  if (setting.prior > 0) options.push(`class_prior=${number(setting.prior)}`);
  if (setting.labels) options.push('supervision="negatives"');
  return `hn.InfoNCE(${options.join(", ")})`;
}
