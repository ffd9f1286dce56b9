"use strict";
// The page works without this script but for two things: reading values off curves, and the map.
const data = JSON.parse(document.getElementById("data").textContent);

// ---------------------------------------------------------------- curves

for (const plot of document.querySelectorAll(".plot")) {
  const chart = data.charts[plot.dataset.chart];
  const svg = plot.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const reading = plot.parentElement.querySelector(".reading");
  const steps = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  let place = -1;

  const show = (index) => {
    place = Math.max(0, Math.min(steps.length - 1, index));
    const x = steps[place];
    const across = chart.left + ((x - chart.from) / (chart.to - chart.from)) * (chart.right - chart.left);
    cursor.setAttribute("transform", `translate(${across} 0)`);
    cursor.setAttribute("visibility", "visible");
    const values = chart.lines.map((line) => `${line.label} ${line.y[nearest(line.x, x)]}`);
    reading.textContent = `epoch ${Number(x.toPrecision(4))}: ${values.join(" · ")}`;
  };
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    reading.textContent = "";
  };
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const x = chart.from + ((across - chart.left) / (chart.right - chart.left)) * (chart.to - chart.from);
    show(nearest(steps, x));
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const stride = Math.max(1, Math.round(steps.length / 40));
    const to = { ArrowLeft: place - stride, ArrowRight: place + stride, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}

function nearest(sorted, x) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[high] - x) < Math.abs(sorted[low] - x) ? high : low;
}

// ---------------------------------------------------------------- map

if (data.map) makeMap(data.map);

function makeMap(map) {
  const of = (id) => document.getElementById(id);
  const stage = of("map-stage");
  const canvas = of("map-dots");
  const context = canvas.getContext("2d");
  const tip = of("map-tip");
  const lens = of("map-lens");
  const count = map.names.length;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const view = { zoom: 1, x: 5000, y: 5000 }; // the middle of what is shown, on the map's own grid of 0 … 10,000
  let layout = map.layouts[0];
  let colour = map.colours[0];
  let only = null; // the one group that stands out
  let chosen = null; // kept by a click or Enter
  let pointed = null;
  let asked = false;

  const sheets = map.sheets.map((uri) => {
    const image = new Image();
    image.addEventListener("load", () => {
      const current = pointed;
      pointed = null; // drawn anew, now that its picture is there
      point(current);
    });
    image.src = uri;
    return image;
  });

  // ---- places and colours

  function geometry() {
    const side = Math.min(canvas.width, canvas.height) * 0.94 * view.zoom;
    return {
      x: (index) => canvas.width / 2 + ((layout.x[index] - view.x) / 10000) * side,
      y: (index) => canvas.height / 2 - ((layout.y[index] - view.y) / 10000) * side,
      side,
    };
  }

  // Ten colours that differ in hue and lightness; of more groups, hues a golden angle apart.
  function shade(group, groups) {
    const light = dark.matches ? [70, 80, 62] : [44, 34, 54];
    const hue = groups <= 10 ? [217, 24, 150, 305, 52, 350, 188, 275, 95, 0][group] : (group * 137.508) % 360;
    const full = groups <= 10 && group === 9 ? 0 : 68;
    return `hsl(${hue} ${full}% ${light[group % 3]}%)`;
  }

  function draw() {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      paint();
    });
  }

  function paint() {
    const { x, y } = geometry();
    const ratio = devicePixelRatio || 1;
    const room = Math.sqrt((canvas.width * canvas.height) / count) / ratio;
    const radius = Math.max(1.6, Math.min(5, 0.17 * room)) * ratio * Math.min(Math.sqrt(view.zoom), 2.2);
    context.clearRect(0, 0, canvas.width, canvas.height);
    for (const faded of only === null ? [false] : [true, false]) {
      context.globalAlpha = faded ? 0.1 : 0.82;
      for (let index = 0; index < count; index++) {
        if (only !== null && (colour.of[index] !== only) !== faded) continue;
        context.fillStyle = shade(colour.of[index], colour.groups.length);
        context.beginPath();
        context.arc(x(index), y(index), radius, 0, 2 * Math.PI);
        context.fill();
      }
    }
    context.globalAlpha = 1;
    const current = pointed ?? chosen;
    if (current === null) return;
    const ink = getComputedStyle(stage).color;
    context.strokeStyle = ink;
    context.lineWidth = ratio;
    context.globalAlpha = 0.45;
    for (const other of map.near[current]) {
      context.beginPath();
      context.moveTo(x(current), y(current));
      context.lineTo(x(other), y(other));
      context.stroke();
    }
    context.globalAlpha = 1;
    context.lineWidth = 2 * ratio;
    context.beginPath();
    context.arc(x(current), y(current), radius + 3 * ratio, 0, 2 * Math.PI);
    context.stroke();
  }

  function picture(target, index) {
    const brush = target.getContext("2d");
    const within = index % map.perSheet;
    const sheet = sheets[Math.floor(index / map.perSheet)];
    const [left, top] = [(within % map.columns) * map.side, Math.floor(within / map.columns) * map.side];
    brush.imageSmoothingEnabled = map.side > 40;
    brush.clearRect(0, 0, target.width, target.height);
    if (sheet.complete && sheet.naturalWidth)
      brush.drawImage(sheet, left, top, map.side, map.side, 0, 0, target.width, target.height);
  }

  function described(index) {
    return map.colours.map((one) => one.groups[one.of[index]]).join(" · ");
  }

  // ---- what is pointed at, what is chosen

  function point(index) {
    if (pointed === index && index !== null) return;
    pointed = index;
    tip.hidden = index === null;
    if (index !== null) {
      picture(tip.querySelector("canvas"), index);
      tip.querySelector("b").textContent = map.colours[0].groups[map.colours[0].of[index]];
      tip.dataset.index = String(index);
      const { x, y } = geometry();
      const ratio = devicePixelRatio || 1;
      const [left, top] = [x(index) / ratio, y(index) / ratio];
      tip.style.left = `${left > stage.clientWidth / 2 ? left - 126 : left + 14}px`;
      tip.style.top = `${Math.max(4, Math.min(stage.clientHeight - 142, top - 60))}px`;
    }
    fill(index ?? chosen);
    draw();
  }

  function fill(index) {
    lens.hidden = index === null;
    of("map-hint").hidden = index !== null;
    if (index === null) return;
    picture(of("map-picture"), index);
    of("map-picture").setAttribute("aria-label", `${map.names[index]}, ${described(index)}`);
    of("map-name").textContent = map.names[index];
    of("map-group").textContent = described(index);
    const near = of("map-near");
    while (near.children.length < map.near[index].length) {
      const button = document.createElement("button");
      button.type = "button";
      const small = document.createElement("canvas");
      small.width = small.height = 64;
      button.append(small);
      button.addEventListener("click", () => choose(Number(button.dataset.index), true));
      near.append(button);
    }
    [...near.children].forEach((button, place) => {
      const other = map.near[index][place];
      button.dataset.index = String(other);
      button.title = `${map.names[other]}, ${described(other)}`;
      button.setAttribute("aria-label", `Go to ${button.title}`);
      picture(button.firstChild, other);
    });
  }

  function choose(index, show = false) {
    chosen = index;
    if (show) {
      pointed = null;
      tip.hidden = true;
      follow(index);
    }
    fill(index);
    if (index !== null) say(index);
    draw();
  }

  function say(index) {
    const groups = map.colours[0];
    const alike = map.near[index].filter((other) => groups.of[other] === groups.of[index]).length;
    of("map-said").textContent =
      `${map.names[index]}, ${described(index)}; ${alike} of its ${map.near[index].length} nearest are of the same ${groups.name}`;
  }

  // Keep a dot inside what is shown.
  function follow(index) {
    const { x, y } = geometry();
    const inside = x(index) > 0 && x(index) < canvas.width && y(index) > 0 && y(index) < canvas.height;
    if (!inside) [view.x, view.y] = [layout.x[index], layout.y[index]];
  }

  function under(event) {
    const box = stage.getBoundingClientRect();
    const ratio = devicePixelRatio || 1;
    const [left, top] = [(event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio];
    const { x, y } = geometry();
    let best = null;
    let least = ((event.pointerType === "touch" ? 28 : 16) * ratio) ** 2;
    for (let index = 0; index < count; index++) {
      if (only !== null && colour.of[index] !== only) continue;
      const distance = (x(index) - left) ** 2 + (y(index) - top) ** 2;
      if (distance < least) [best, least] = [index, distance];
    }
    return best;
  }

  // The nearest dot in a direction: what lies aside counts twice.
  function beside(index, right, up) {
    let best = null;
    let least = Infinity;
    for (let other = 0; other < count; other++) {
      if (only !== null && colour.of[other] !== only) continue;
      const [dx, dy] = [layout.x[other] - layout.x[index], layout.y[other] - layout.y[index]];
      const ahead = dx * right + dy * up;
      const aside = Math.abs(dx * up - dy * right);
      if (ahead <= 0 || aside > ahead) continue;
      if (ahead + 2 * aside < least) [best, least] = [other, ahead + 2 * aside];
    }
    return best;
  }

  // ---- pointer and keys

  let drag = null;
  stage.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, view: { ...view }, moved: false };
  });
  stage.addEventListener("pointermove", (event) => {
    if (drag && view.zoom > 1 && event.buttons) {
      const scale = 10000 / (geometry().side / (devicePixelRatio || 1));
      drag.moved ||= Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 4;
      view.x = drag.view.x - (event.clientX - drag.x) * scale;
      view.y = drag.view.y + (event.clientY - drag.y) * scale;
      if (drag.moved) point(null);
      draw();
      return;
    }
    point(under(event));
  });
  stage.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) {
      const found = under(event);
      choose(found);
      point(found);
    }
    drag = null;
  });
  stage.addEventListener("pointerleave", (event) => {
    drag = null;
    if (event.pointerType !== "touch") point(null);
  });
  stage.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    const current = pointed ?? chosen;
    if (way || event.key === "Home") {
      const start = only === null ? 0 : colour.of.indexOf(only);
      const next = current === null || event.key === "Home" ? start : (beside(current, ...way) ?? current);
      follow(next);
      pointed = null; // drawn anew, wherever it is now
      point(next);
      say(next);
    } else if (event.key === "Enter" || event.key === " ") {
      choose(current);
    } else if (event.key === "Escape") {
      choose(null);
      point(null);
    } else if (event.key === "+" || event.key === "=") zoom(1.6);
    else if (event.key === "-") zoom(1 / 1.6);
    else if (event.key === "0") zoom(0);
    else return;
    event.preventDefault();
  });

  function zoom(factor) {
    const current = pointed ?? chosen;
    view.zoom = factor === 0 ? 1 : Math.max(1, Math.min(40, view.zoom * factor));
    if (view.zoom === 1) [view.x, view.y] = [5000, 5000];
    else if (current !== null) [view.x, view.y] = [layout.x[current], layout.y[current]];
    stage.style.touchAction = view.zoom > 1 ? "none" : "";
    const kept = pointed;
    pointed = null;
    tip.hidden = true;
    if (kept !== null) point(kept);
    draw();
  }

  of("map-in").addEventListener("click", () => zoom(1.6));
  of("map-out").addEventListener("click", () => zoom(1 / 1.6));
  of("map-all").addEventListener("click", () => zoom(0));

  // ---- choices

  function offer(select, choices, take) {
    choices.forEach((choice, number) => select.append(new Option(choice.name, String(number))));
    select.addEventListener("change", () => {
      take(choices[Number(select.value)]);
      point(null);
      draw();
    });
  }
  offer(of("map-layout"), map.layouts, (found) => (layout = found));
  offer(of("map-colour"), map.colours, (found) => {
    colour = found;
    only = null;
    legend();
  });

  function legend() {
    const box = of("map-legend");
    const sizes = colour.groups.map(() => 0);
    colour.of.forEach((group) => (sizes[group] += 1));
    box.replaceChildren(
      ...colour.groups.map((name, group) => {
        const button = document.createElement("button");
        button.type = "button";
        const swatch = document.createElement("i");
        swatch.className = "swatch";
        swatch.style.color = shade(group, colour.groups.length);
        button.append(swatch, `${name} (${sizes[group]})`);
        button.setAttribute("aria-pressed", String(only === group));
        button.addEventListener("click", () => {
          only = only === group ? null : group;
          [...box.children].forEach((one, place) => one.setAttribute("aria-pressed", String(only === place)));
          draw();
        });
        return button;
      }),
    );
  }

  function fit() {
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(stage.clientWidth * ratio);
    canvas.height = Math.round(stage.clientHeight * ratio);
    point(null);
    draw();
  }
  new ResizeObserver(fit).observe(stage);
  dark.addEventListener("change", () => {
    legend();
    draw();
  });
  legend();
  fit();
}
