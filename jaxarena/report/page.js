"use strict";
(() => {
  const data = JSON.parse(document.getElementById("plan").textContent);
  const at = id => document.getElementById(id);
  const boxes = data.boxes.map(([name, detail, kind, bytes, size, offset, first, last, scratch, writes, reads]) =>
    ({ name, detail, kind, bytes, size, offset, first, last, scratch, writes, reads }));
  const launches = data.launches.map(([name, live, xla, loops]) => ({ name, live, xla, loops, reads: new Set(), writes: new Set() }));
  for (const box of boxes) {
    for (const t of box.writes) launches[t].writes.add(box);
    for (const t of box.reads) launches[t].reads.add(box);
  }
  const panels = at("panels"), arena = at("arena"), tip = at("tip"), cursor = at("cursor");
  const shapes = [...arena.querySelectorAll(".box")], cells = [...at("strip").querySelectorAll("rect")];
  // The page's own tip takes the place of the browser's.
  for (const title of panels.querySelectorAll(".box > title, .strip title")) title.remove();
  const count = launches.length, top = Number(arena.dataset.top);
  const grouped = n => n.toLocaleString("en");

  // What is shown: the launch and box under the cursor, whether they are held, and what search and kinds pick.
  let launch = -1, box = null, held = false, query = "", kinds = new Set();

  const element = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
  const some = list => list.slice(0, 5).map(b => b.name).join(", ") + (list.length > 5 ? ` and ${list.length - 5} more` : "");

  function section(title, kind, rows) {
    const heading = element("h2", title), table = element("table", "");
    heading.className = `k${kind}`;
    for (const [name, value] of rows) {
      if (!value) continue;
      const row = element("tr", "");
      row.append(element("th", name), element("td", value));
      table.append(row);
    }
    return [heading, table];
  }

  function aboutBox(b) {
    const by = t => t === undefined ? "" : `${t} ${launches[t].name}`;
    return section(b.name, b.kind, [
      ["what", b.detail],
      ["size", `${b.size} (${grouped(b.bytes)} bytes)`],
      ["offset", grouped(b.offset)],
      ["lives", b.first === b.last ? `at launch ${b.first}` : `launches ${b.first} to ${b.last}`],
      ["written first", b.scratch ? "" : by(b.writes[0])],
      ["read last", b.scratch ? "" : by(b.reads.at(-1))],
    ]);
  }

  function aboutLaunch(t) {
    const l = launches[t], kind = cells[t].getAttribute("class").match(/k(\d+)/)[1];
    const arrays = set => [...set].filter(b => !b.scratch);
    return section(`${t} ${l.name}`, kind, [
      ["in", l.loops], ["arena live", l.live], ["XLA, estimated", l.xla],
      ["reads", box ? "" : some(arrays(l.reads))], ["writes", box ? "" : some(arrays(l.writes))],
      ["scratch", box ? "" : some([...l.writes].filter(b => b.scratch))],
    ]);
  }

  const matches = () => boxes.filter(b =>
    (!query || `${b.name} ${b.detail}`.toLowerCase().includes(query)) && (!kinds.size || kinds.has(b.kind)));

  // Draws the state. `touching`: pick out what the launch touches.
  function show(touching = false) {
    const picking = touching || query !== "" || kinds.size > 0;
    const picked = new Set(touching ? [...launches[launch].reads, ...launches[launch].writes] : picking ? matches() : []);
    panels.classList.toggle("picking", picking);
    panels.classList.toggle("tracing", box !== null);
    shapes.forEach((shape, n) => {
      shape.classList.toggle("picked", picked.has(boxes[n]));
      shape.classList.toggle("here", boxes[n] === box);
    });
    cells.forEach((cell, t) => {
      cell.classList.toggle("writes", box !== null && box.writes.includes(t));
      cell.classList.toggle("reads", box !== null && box.reads.includes(t));
    });
    cursor.hidden = tip.hidden = launch < 0;
    if (launch < 0) return;
    cursor.style.left = `${100 * launch / count}%`;
    cursor.style.width = `${100 / count}%`;
    tip.replaceChildren(...(box ? aboutBox(box) : []), ...aboutLaunch(launch));
  }

  function put(x, y) {
    const gap = 16, { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, x + gap + width > innerWidth ? x - gap - width : x + gap)}px`;
    tip.style.top = `${Math.max(4, Math.min(y + gap, innerHeight - height - 4))}px`;
  }

  // The box at a place, or the nearest within three pixels, so that thin ones can be met.
  function boxAt(t, y, height) {
    const byte = top * (1 - y / height), slack = 3 * top / height;
    const away = b => Math.max(b.offset - byte, byte - b.offset - b.bytes, 0);
    return boxes.filter(b => b.bytes && b.first <= t && t <= b.last && away(b) <= slack).sort((a, b) => away(a) - away(b))[0] ?? null;
  }

  function point(event) {
    if (!count) return;
    const frame = panels.getBoundingClientRect(), inner = arena.getBoundingClientRect();
    launch = Math.min(count - 1, Math.max(0, Math.floor((event.clientX - frame.left) / frame.width * count)));
    const inArena = event.clientY >= inner.top && event.clientY <= inner.bottom;
    box = inArena ? boxAt(launch, event.clientY - inner.top, inner.height) : null;
    show(!inArena && event.clientY > inner.bottom);
    put(event.clientX, event.clientY);
  }

  function letGo() {
    launch = -1; box = null; held = false;
    show();
  }

  panels.addEventListener("pointermove", event => { if (!held) point(event); });
  panels.addEventListener("pointerleave", () => { if (!held) letGo(); });
  panels.addEventListener("click", event => { const was = held; point(event); held = !was; });
  document.addEventListener("click", event => { if (held && !panels.contains(event.target)) letGo(); });

  // Moves the cursor without a pointer: into view, the tip beside it, spoken.
  function go(t, target) {
    launch = t; box = target; held = true;
    const scroll = at("scroll"), x = (t + .5) / count * panels.clientWidth;
    if (x < scroll.scrollLeft || x > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = x - scroll.clientWidth / 2;
    show();
    const frame = panels.getBoundingClientRect(), inner = arena.getBoundingClientRect();
    const height = box ? (box.offset + box.bytes / 2) / top : 1;
    put(frame.left + x, inner.top + inner.height * (1 - height));
    at("spoken").textContent = [...tip.querySelectorAll("h2, tr")].map(e => e.textContent).join(", ");
  }

  function goToNextMatch() {
    const found = matches();
    const next = found[(found.indexOf(box) + 1) % found.length];
    if (next) go(next.first, next);
  }

  function step(key) {
    const t = launch < 0 ? 0 : launch;
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const to = launch < 0 ? 0 : Math.min(count - 1, Math.max(0, t + (key === "ArrowLeft" ? -1 : 1)));
      return go(to, box && box.first <= to && to <= box.last ? box : null);
    }
    const live = boxes.filter(b => b.bytes && b.first <= t && t <= b.last).sort((a, b) => a.offset - b.offset);
    const here = live.indexOf(box), up = key === "ArrowUp";
    go(t, live[here < 0 ? (up ? 0 : live.length - 1) : here + (up ? 1 : -1)] ?? null);
  }

  panels.addEventListener("keydown", event => {
    if (event.key.startsWith("Arrow") && count) step(event.key);
    else if (event.key === "Enter") goToNextMatch();
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") letGo();
    else if (event.key === "/" && event.target.tagName !== "INPUT") { event.preventDefault(); at("search").focus(); }
  });

  function pick() {
    const found = matches();
    at("found").textContent = query || kinds.size ? `${found.length} of ${boxes.length}` : "";
    show();
  }
  at("search").addEventListener("input", event => { query = event.target.value.trim().toLowerCase(); pick(); });
  at("search").addEventListener("keydown", event => { if (event.key === "Enter") goToNextMatch(); });
  for (const button of document.querySelectorAll("[data-kind]")) {
    button.addEventListener("click", () => {
      const kind = Number(button.dataset.kind);
      if (!kinds.delete(kind)) kinds.add(kind);
      button.setAttribute("aria-pressed", kinds.has(kind));
      pick();
    });
  }

  // Labels go where a box is too narrow for a few letters.
  function fit() {
    const column = panels.clientWidth / Math.max(count, 1);
    shapes.forEach((shape, n) => shape.classList.toggle("narrow", (boxes[n].last + 1 - boxes[n].first) * column < 34));
  }
  at("zoom").addEventListener("input", event => {
    const scroll = at("scroll"), middle = (scroll.scrollLeft + scroll.clientWidth / 2) / panels.clientWidth;
    panels.style.setProperty("--zoom", 2 ** event.target.value);
    scroll.scrollLeft = middle * panels.clientWidth - scroll.clientWidth / 2;
    fit();
  });
  addEventListener("resize", fit);
  fit();
})();
