// Fits each slide into the frame by its real height, and starts reveal.js.

const WIDTH = 1280, HEIGHT = 720; // pixels of the frame
const LEAST = 0.75; // of a figure's height remains when what explains it joins it
const LEAST_ABOVE_CAPTION = 0.5;

const overflows = slide => slide.scrollHeight > HEIGHT + 1 || slide.scrollWidth > WIDTH + 1;

// What a slide leaves out goes to its notes, unless they have it already.
function leaveOut(extra) {
  const pieces = extra.matches('.piece') ? [extra] : [...extra.children];
  for (const piece of pieces.filter(piece => !piece.matches('.noted'))) {
    const note = document.createElement('aside');
    note.className = 'notes';
    note.append(...piece.childNodes);
    extra.before(note);
  }
  extra.remove();
}

// A figure takes the room that is left.
function shrink(image, slide) {
  image.style.maxHeight = image.clientHeight - (slide.scrollHeight - HEIGHT) + 'px';
}

// A formula becomes as small as its width asks.
function narrow(slide) {
  for (const formula of slide.querySelectorAll('.formula')) {
    formula.style.fontSize = '';
    const wide = formula.querySelector('svg').getBoundingClientRect().width / formula.clientWidth;
    const size = parseFloat(getComputedStyle(formula).fontSize);
    if (wide > 1) formula.style.fontSize = 0.97 * size / wide + 'px';
  }
}

function fit(slide) {
  const extras = [...slide.querySelectorAll(':scope > .extra')];
  for (const extra of extras) extra.hidden = true;
  narrow(slide);
  const image = slide.querySelector(':is(.figure, .cover) img'), whole = image?.clientHeight;
  const cramped = (least = LEAST) => overflows(slide) || image?.clientHeight < least * whole;
  const shrunk = () => image && overflows(slide) && shrink(image, slide);
  shrunk();
  if (cramped()) {
    slide.classList.add('small');
    narrow(slide);
    if (image) image.style.maxHeight = '';
    shrunk();
  }
  const rows = [...slide.querySelectorAll(':scope > .table tbody > tr, :scope > .list > * > li')];
  const full = rows[0]?.closest('.piece').cloneNode(true);
  const all = rows.length;
  while (overflows(slide) && rows.length > 1) rows.pop().remove();
  if (rows.length < all) {
    slide.append(full);
    leaveOut(full);
  }
  const pieces = [...slide.querySelectorAll(':scope > :is(.text, .code, .output)')];
  const leads = () => pieces.at(-1).textContent.trim().endsWith(':'); // to what has been left out
  for (let left = false; pieces.length > 1 && (overflows(slide) || left && leads()); left = true) {
    leaveOut(pieces.pop());
    slide.classList.remove('small');
  }
  slide.classList.toggle('small', slide.matches('.small') || overflows(slide));
  for (const extra of extras) {
    const before = image?.style.maxHeight;
    extra.hidden = false;
    if (extra.matches('.explains')) shrunk();
    if (!cramped(extra.matches('.caption') ? LEAST_ABOVE_CAPTION : LEAST)) continue;
    if (image) image.style.maxHeight = before;
    leaveOut(extra);
  }
  // A key shows something: where all pieces wait, the first ones do not, unless they answer.
  const waits = [...slide.querySelectorAll('.piece.fragment')];
  const first = Math.min(...waits.map(piece => piece.dataset.fragmentIndex));
  const firsts = waits.filter(piece => piece.dataset.fragmentIndex == first);
  if (!slide.querySelector('.piece:not(.fragment, .below)')
      && !firsts.some(piece => piece.matches('.answer')))
    for (const piece of firsts) piece.classList.remove('fragment');
}

async function start() {
  const slides = document.querySelector('.slides');
  document.body.classList.add('measuring');
  await MathJax.startup.promise;
  await MathJax.typesetPromise([slides]);
  await Promise.all([...document.images].map(image => image.decode()));
  for (const image of slides.querySelectorAll('.figure img')) // as large as the frame's width allows
    image.style.width = Math.min(1168, 1.31 * image.naturalWidth) + 'px';
  for (const slide of slides.querySelectorAll('.stack > section')) fit(slide);
  document.body.classList.remove('measuring');
  await Reveal.initialize({
    width: WIDTH, height: HEIGHT, margin: 0.02, minScale: 0.1, maxScale: 4, center: false,
    hash: true, slideNumber: 'c/t', transition: 'none',
    plugins: [RevealNotes],
  });
  document.body.classList.add('ready');
}

start();
