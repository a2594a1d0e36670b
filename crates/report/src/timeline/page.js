"use strict";
(() => {
  const ROW = 17, GAP = 10, LEFT = 150, AXIS = 22, FONT = "11px sans-serif";
  const $ = (id) => document.getElementById(id);
  const canvas = $("canvas"), tip = $("tip"), paint = canvas.getContext("2d");
  const data = JSON.parse($("timeline").textContent);

  // Bars of a row are sorted and do not overlap, so that what is at a time is found by bisection.
  let y = AXIS, end = 1;
  const rows = [];
  const lanes = data.lanes.map((lane) => {
    const top = y;
    for (const row of lane.rows) {
      const n = row.starts.length, starts = new Float64Array(n), ends = new Float64Array(n);
      for (let i = 0, at = 0; i < n; i++) {
        at += row.starts[i];
        starts[i] = at;
        ends[i] = at + row.lengths[i];
        if (ends[i] > end) end = ends[i];
      }
      rows.push({ lane: lane.name, y, n, starts, ends, labels: row.labels, details: row.details });
      y += ROW;
    }
    y += GAP;
    return { name: lane.name, top, bottom: y - GAP };
  });
  const height = Math.max(y, 80);
  const view = { from: 0, to: end };
  let wanted = "", width = 0;

  const colour = new Map();
  const colourOf = (label) => {
    if (label.kind === "idle") return "#e8b4b0";
    if (label.kind === "group") return "#d5dae2";
    let c = colour.get(label.group);
    if (!c) {
      let h = 0;
      for (const char of label.group) h = (h * 31 + char.codePointAt(0)) % 3600;
      c = `hsl(${h / 10} ${label.kind === "phase" ? 35 : 60}% 68%)`;
      colour.set(label.group, c);
    }
    return c;
  };
  const matches = (row, i) => {
    const detail = row.details[i] ? data.details[row.details[i] - 1] : "";
    return (data.labels[row.labels[i]].name + " " + detail).toLowerCase().includes(wanted);
  };

  // The first bar of a row that starts after `time`.
  const after = (row, time) => {
    let low = 0, high = row.n;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.starts[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  };
  const scale = () => (width - LEFT) / (view.to - view.from);
  const timeAt = (x) => view.from + (x - LEFT) / scale();
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  // With 4 digits, or with those that tell it from a time that differs by `step`.
  const show = (ns, step) => {
    const [unit, name] = units.find(([unit]) => Math.abs(ns) >= unit) || units[3];
    const digits = step && Math.max(0, Math.ceil(-Math.log10(step / unit)));
    return `${step ? (ns / unit).toFixed(digits) : Number((ns / unit).toPrecision(4))} ${name}`;
  };

  const axis = () => {
    const least = 90 / scale();
    let step = 10 ** Math.floor(Math.log10(least));
    step *= [1, 2, 5, 10].find((m) => step * m >= least);
    paint.fillStyle = "#555";
    paint.strokeStyle = "#eee";
    for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
      const x = Math.round(LEFT + (t - view.from) * scale()) + 0.5;
      paint.beginPath();
      paint.moveTo(x, AXIS - 6);
      paint.lineTo(x, height);
      paint.stroke();
      paint.fillText(show(t, step), x + 3, 11);
    }
  };

  const drawRow = (row) => {
    const k = scale();
    let i = Math.max(0, after(row, view.from) - 1), drawn = 0;
    while (i < row.n && row.starts[i] < view.to) {
      const x0 = Math.max(LEFT, LEFT + (row.starts[i] - view.from) * k);
      const x1 = Math.min(width, LEFT + (row.ends[i] - view.from) * k);
      if (x1 < LEFT) { i++; continue; }
      const label = data.labels[row.labels[i]], w = Math.max(x1 - x0, 0.7);
      paint.globalAlpha = !wanted || matches(row, i) ? 1 : 0.18;
      paint.fillStyle = colourOf(label);
      paint.fillRect(x0, row.y, w > 3 ? w - 0.5 : w, ROW - 2);
      if (w > 28) {
        paint.save();
        paint.beginPath();
        paint.rect(x0, row.y, w - 2, ROW);
        paint.clip();
        paint.fillStyle = "#111";
        paint.fillText(label.name, x0 + 3, row.y + 11);
        paint.restore();
      }
      drawn++;
      if (x1 - x0 >= 0.7) { i++; continue; }
      // Bars that end within the pixel that was just painted cannot be told apart.
      const painted = timeAt(x0 + 0.7), last = after(row, painted) - 1;
      i = Math.max(i + 1, row.ends[last] > painted ? last : last + 1);
    }
    paint.globalAlpha = 1;
    return drawn;
  };

  const draw = () => {
    const ratio = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint.font = FONT;
    paint.fillStyle = "#fff";
    paint.fillRect(0, 0, width, height);
    axis();
    const drawn = rows.reduce((sum, row) => sum + drawRow(row), 0);
    paint.fillStyle = "#f7f7f9";
    paint.fillRect(0, 0, LEFT - 2, height);
    paint.fillStyle = "#222";
    for (const lane of lanes) paint.fillText(lane.name, 6, lane.top + 12, LEFT - 12);
    Object.assign(canvas.dataset, { from: view.from, to: view.to, drawn });
  };
  let pending = false;
  const redraw = () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; draw(); });
  };

  const look = (from, to) => {
    const span = Math.min(Math.max(to - from, 20), end * 1.1);
    const start = Math.min(Math.max(from, -0.05 * end), 1.05 * end - span);
    Object.assign(view, { from: start, to: start + span });
    tip.hidden = true;
    redraw();
  };
  const fit = () => look(0, end);
  const zoom = (factor, x) => {
    const at = x === undefined ? (view.from + view.to) / 2 : timeAt(Math.max(x, LEFT));
    look(at - (at - view.from) * factor, at + (view.to - at) * factor);
  };
  const pan = (pixels) => look(view.from + pixels / scale(), view.to + pixels / scale());

  // The bar under a place of the canvas; one that is thinner than the pointer is found as well.
  const barAt = (x, y) => {
    const row = rows.find((row) => y >= row.y && y < row.y + ROW);
    if (!row || x < LEFT) return null;
    const slack = 2 / scale(), time = timeAt(x);
    for (const i of [after(row, time) - 1, after(row, time)]) {
      if (i >= 0 && i < row.n && row.starts[i] <= time + slack && row.ends[i] >= time - slack) {
        return { row, i, label: data.labels[row.labels[i]] };
      }
    }
    return null;
  };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const describe = (event) => {
    const [x, y] = place(event), bar = barAt(x, y);
    tip.hidden = !bar;
    if (!bar) return;
    const { row, i, label } = bar, detail = row.details[i] && data.details[row.details[i] - 1];
    const lines = [label.name, `${show(row.ends[i] - row.starts[i])}, from ${show(row.starts[i])}`];
    if (detail) lines.splice(1, 0, ...detail.split("\n"));
    tip.textContent = [...lines, row.lane].join("\n");
    tip.style.left = `${Math.max(0, Math.min(x + 14, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 16}px`;
  };

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [x] = place(event);
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(sideways);
    else zoom(Math.exp(event.deltaY * 0.002), x);
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = event.clientX;
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (held === null) return describe(event);
    pan(held - event.clientX);
    held = event.clientX;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", (event) => {
    const bar = barAt(...place(event));
    if (!bar) return;
    const [from, to] = [bar.row.starts[bar.i], bar.row.ends[bar.i]];
    look(from - (to - from) * 0.05, to + (to - from) * 0.05);
  });
  const keys = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: fit,
    ArrowLeft: () => pan(-80), ArrowRight: () => pan(80),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  $("fit").addEventListener("click", fit);
  $("in").addEventListener("click", () => zoom(0.6));
  $("out").addEventListener("click", () => zoom(1 / 0.6));
  $("find").addEventListener("input", (event) => {
    wanted = event.target.value.toLowerCase();
    let n = 0, total = 0;
    if (wanted) {
      for (const row of rows) {
        for (let i = 0; i < row.n; i++) {
          if (matches(row, i)) { n++; total += row.ends[i] - row.starts[i]; }
        }
      }
    }
    $("found").textContent = wanted ? `${n} bars, ${show(total)} in all` : "";
    redraw();
  });

  const phases = [];
  for (const row of rows) {
    for (let i = 0; i < row.n; i++) {
      const label = data.labels[row.labels[i]];
      if (label.kind === "phase") phases.push([row.starts[i], row.ends[i], label.name]);
    }
  }
  phases.sort((a, b) => a[0] - b[0]);
  for (const [i, [, , name]] of phases.entries()) $("phases").append(new Option(name, i));
  $("phases").addEventListener("change", (event) => {
    if (event.target.value === "") return;
    const [from, to] = phases[event.target.value];
    look(from - (to - from) * 0.02, to + (to - from) * 0.02);
  });
  window.addEventListener("resize", redraw);
  draw();
})();
