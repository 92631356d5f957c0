// Shares out what each part of a lesson holds over slides, by its real height, and starts reveal.js.

const WIDTH = 1280, HEIGHT = 720; // pixels of the frame
const LEAST_FIGURE = 330; // so high is a figure that shares its slide, and so much of what it could be
const LEAST_SHARE = 0.75;

const overflows = slide => slide.scrollHeight > HEIGHT + 1 || slide.scrollWidth > WIDTH + 1;
const last = (slide, selector) => [...slide.querySelectorAll(':scope > ' + selector)].pop();
const content = slide => slide.querySelectorAll(':scope > .piece:not(.below)').length;

// A part's slides, made one behind the other inside of `stack`.
class Slides {
  constructor(stack, title) {
    this.stack = stack;
    this.title = title;
    this.below = null; // the heading below the title, repeated like it
    this.next();
  }

  next() {
    this.slide = document.createElement('section');
    this.slide.className = 'present';
    this.slide.append(this.title.cloneNode(true));
    if (this.below) this.slide.append(this.below.cloneNode(true));
    this.stack.append(this.slide);
  }

  add(piece) {
    if (piece.matches('aside')) return this.slide.append(piece);
    if (piece.matches('.break, .below') && (content(this.slide) || last(this.slide, '.below'))) {
      this.below = null;
      this.next();
    }
    if (piece.matches('.break')) return;
    if (piece.matches('.below')) this.below = piece;
    this.slide.append(piece);
    if (!overflows(this.slide)) return;
    if (piece.matches('.math') && this.narrow(piece)) return;
    const figure = piece.matches('.figure, .text, .output') ? last(this.slide, '.figure') : null;
    if (figure && this.shrinkFigure(figure)) return;
    if (content(this.slide) > 1) this.moveOn();
    if (overflows(this.slide) && piece.matches('.figure')) this.shrinkFigure(piece, true);
    for (const size of ['small', 'tiny'])
      if (overflows(this.slide)) piece.classList.add(size);
    if (overflows(this.slide)) this.cut(piece);
  }

  // A formula becomes as small as its width asks.
  narrow(piece) {
    const wide = piece.querySelector('svg').getBoundingClientRect().width;
    if (wide > piece.clientWidth) piece.style.fontSize = 26 * piece.clientWidth / wide + 'px';
    return !overflows(this.slide);
  }

  // A figure takes the room that is left, if that is enough.
  shrinkFigure(piece, alone = false) {
    const image = piece.querySelector('img'), before = image.style.maxHeight;
    const room = image.clientHeight - (this.slide.scrollHeight - HEIGHT);
    image.style.maxHeight = '';
    const whole = image.clientHeight, least = Math.max(LEAST_FIGURE, LEAST_SHARE * whole);
    image.style.maxHeight = room + 'px';
    if ((alone || room >= Math.min(least, whole)) && !overflows(this.slide)) return true;
    image.style.maxHeight = before;
    return false;
  }

  // The last piece goes to a new slide, and with it what leads to it, as far as that fits there.
  moveOn() {
    const pieces = [...this.slide.querySelectorAll(':scope > .piece:not(.below)')];
    let begin = pieces.length - 1;
    while (begin > 1 && pieces[begin - 1].matches('.leads, .predict')) begin--;
    const before = this.slide;
    this.next();
    const end = pieces.length - 1;
    for (let first = begin; begin <= end; begin++) {
      const torn = begin > first && pieces[begin - 1].matches('.text.leads');
      if (torn && begin < end) continue;
      const tail = [];
      for (let node = pieces[begin]; node; node = node.nextSibling) tail.push(node);
      this.slide.append(...tail);
      if (!overflows(this.slide) || begin === end) return;
      const texts = tail.filter(node => node.matches('.code:not(.small), .output:not(.small)'));
      texts.forEach(node => node.classList.add('small'));
      if (!overflows(this.slide)) return;
      texts.forEach(node => node.classList.remove('small'));
      before.append(...tail);
    }
  }

  // A table is cut between rows, a list between items, text between lines; else it is an error.
  cut(piece) {
    const rest = piece.cloneNode(true);
    const rows = node => node.matches('.table') ? [...node.querySelectorAll('tbody > tr')]
      : node.matches('.list') ? [...node.querySelectorAll(':scope > * > li')] : [];
    if (rows(piece).length > 1) {
      const all = rows(piece).length;
      while (overflows(this.slide) && rows(piece).length > 1) rows(piece).pop().remove();
      const kept = rows(piece).length;
      rows(rest).slice(0, kept).forEach(row => row.remove());
      rest.querySelector('ol')?.setAttribute('start', kept + 1);
      if (kept === all) return;
    } else if (piece.querySelector('pre')) {
      const pre = piece.querySelector('pre'), lines = pre.textContent.split('\n');
      let kept = lines.length;
      while (overflows(this.slide) && kept > 1) pre.textContent = lines.slice(0, --kept).join('\n');
      rest.querySelector('pre').textContent = lines.slice(kept).join('\n');
      if (kept === lines.length) return;
    } else return;
    this.next();
    this.add(rest);
  }
}

function shareOut(part) {
  const stack = document.createElement('section');
  stack.className = 'stack present';
  part.before(stack);
  const pieces = [...part.children];
  const slides = new Slides(stack, pieces.shift());
  part.remove();
  if (part.matches('.first')) stack.firstChild.classList.add('first');
  for (const piece of pieces) slides.add(piece);
  stack.classList.remove('present');
  for (const slide of stack.children) slide.classList.remove('present');
}

async function start() {
  const slides = document.querySelector('.slides');
  document.body.classList.add('measuring');
  await MathJax.startup.promise;
  await MathJax.typesetPromise([slides]);
  await Promise.all([...document.images].map(image => image.decode()));
  for (const image of slides.querySelectorAll('img')) // as large as the frame's width allows
    image.style.width = Math.min(1168, 1.25 * image.naturalWidth) + 'px';
  for (const part of [...slides.children]) shareOut(part);
  document.body.classList.remove('measuring');
  await Reveal.initialize({
    width: WIDTH, height: HEIGHT, margin: 0.02, minScale: 0.1, maxScale: 4, center: false,
    hash: true, slideNumber: 'c/t', transition: 'none',
    plugins: [RevealNotes],
  });
  document.body.classList.add('ready');
}

start();
