// A subset of Markdown as elements: headings, lists, tables, quotes, code, emphasis and links. The text comes from a
// model, so it becomes text nodes only, never HTML, and links lead to http and https alone.

const make = (name, ...children) => {
  const made = document.createElement(name);
  made.append(...children);
  return made;
};

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__|(?<![\w*])\*(?=[^\s*])([^*\n]*?[^\s*])\*(?!\*)|(?<!\w)_(?=\S)([^_\n]*?\S)_(?!\w)|~~(?=\S)([\s\S]*?\S)~~|!?\[([^\]\n]*)\]\(\s*(\S+?)(?:\s+"[^"\n]*")?\s*\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/;
const MOST_DEPTH = 8; // of emphasis and lists within each other

function inline(text, depth = 0) {
  const found = [];
  let rest = text;
  for (let match = INLINE.exec(rest); match && depth < MOST_DEPTH; match = INLINE.exec(rest)) {
    const [all, , code, strong, strong2, em, em2, gone, label, target, bare] = match;
    found.push(rest.slice(0, match.index));
    const part = strong ?? strong2, light = em ?? em2;
    if (code !== undefined) found.push(make("code", code.replace(/^ (.*) $/s, "$1")));
    else if (part !== undefined) found.push(make("strong", ...inline(part, depth + 1)));
    else if (light !== undefined) found.push(make("em", ...inline(light, depth + 1)));
    else if (gone !== undefined) found.push(make("s", ...inline(gone, depth + 1)));
    else found.push(...link(label ?? bare, target ?? bare, all, depth));
    rest = rest.slice(match.index + all.length);
  }
  return [...found, rest].filter(each => each !== "");
}

function link(label, target, all, depth) {
  if (!/^https?:\/\//i.test(target)) return [all];
  const made = make("a", ...(label === target ? [label] : inline(label, depth + 1)));
  Object.assign(made, { href: target, rel: "noopener noreferrer nofollow", target: "_blank" });
  return [made];
}

const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*(\S*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const ROW = /^\s*\|?.*\|.*$/, DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const cells = line => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map(each => each.trim());
const begins = (line, next) => !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || /^ {0,3}>/.test(line)
  || ITEM.test(line) || (ROW.test(line) && next !== undefined && next.includes("|") && DIVIDER.test(next));

function blocks(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    let match;
    const take = test => {
      const taken = [];
      while (at < lines.length && test(lines[at], taken.length)) taken.push(lines[at++]);
      return taken;
    };
    if (!line.trim()) {
      at += 1;
    } else if ((match = FENCE.exec(line))) {
      at += 1;
      const end = new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},}\\s*$`);
      const code = make("code", take(each => !end.test(each)).join("\n"));
      at += 1;
      found.push(make("pre", code));
    } else if ((match = HEADING.exec(line))) {
      at += 1;
      found.push(make(`h${match[1].length}`, ...inline(match[2])));
    } else if (RULE.test(line)) {
      at += 1;
      found.push(make("hr"));
    } else if (/^ {0,3}>/.test(line) && depth < MOST_DEPTH) {
      found.push(make("blockquote", ...blocks(take(each => /^ {0,3}>/.test(each)).map(each => each.replace(/^ {0,3}> ?/, "")), depth + 1)));
    } else if (ITEM.test(line) && depth < MOST_DEPTH) {
      found.push(list(take((each, count) => !count || !each.trim() ? ITEM.test(each) || followed(lines, at) : ITEM.test(each) || /^\s+\S/.test(each)), depth));
    } else if (ROW.test(line) && lines[at + 1]?.includes("|") && DIVIDER.test(lines[at + 1])) {
      const [head, , ...rows] = take(each => each.includes("|"));
      const row = (kind, each) => make("tr", ...cells(each).map(cell => make(kind, ...inline(cell))));
      found.push(make("table", row("th", head), ...rows.map(each => row("td", each))));
    } else {
      const taken = take((each, count) => !count || !begins(each, lines[at + 1]));
      found.push(make("p", ...taken.flatMap((each, index) => {
        const parts = inline(each.trimStart().replace(/\s+$/, ""));
        return index ? [/ {2}$|\\$/.test(taken[index - 1]) ? make("br") : "\n", ...parts] : parts;
      })));
    }
  }
  return found;
}

// Whether a list goes on behind an empty line.
const followed = (lines, at) => at + 1 < lines.length && (ITEM.test(lines[at + 1]) || /^\s{2,}\S/.test(lines[at + 1]));

function list(lines, depth) {
  const [, margin, first] = ITEM.exec(lines[0]);
  const made = make(first === undefined ? "ul" : "ol");
  if (first !== undefined) made.start = Number(first);
  let item = [];
  const close = () => item.length && made.append(make("li", ...tight(blocks(item, depth + 1))));
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= margin.length + 1) {
      close();
      item = [match[3]];
    } else {
      item.push(line.replace(new RegExp(`^\\s{0,${margin.length + 4}}`), each => each.slice(margin.length + 2)));
    }
  }
  close();
  return made;
}

// A single paragraph of an item stands without its <p>.
const tight = parts => parts[0]?.tagName === "P" ? [...parts[0].childNodes, ...parts.slice(1)] : parts;

// Returns the elements of a text.
export const markdown = text => blocks(text.replace(/\r\n?/g, "\n").split("\n"));
