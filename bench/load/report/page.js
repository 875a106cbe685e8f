for (const svg of document.querySelectorAll('svg[data-series]')) {
  const series = JSON.parse(svg.dataset.series), tip = svg.parentNode.querySelector('.tip');
  const cross = svg.querySelector('.cross'), width = svg.viewBox.baseVal.width;
  const hide = () => { tip.style.visibility = cross.style.visibility = 'hidden'; };
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    let at = null;
    tip.replaceChildren(...series.map(line => {
      const near = line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      if (at === null || Math.abs(near[0] - x) < Math.abs(at - x)) at = near[0];
      const row = document.createElement('div'), key = document.createElement('i');
      key.className = 'key c' + line.color;
      row.append(key, line.name + ': ' + near[2]);
      return row;
    }));
    cross.setAttribute('x1', at); cross.setAttribute('x2', at);
    tip.style.visibility = cross.style.visibility = 'visible';
    const left = at / width * box.width;
    tip.style.left = Math.min(left + 10, box.width - tip.offsetWidth - 4) + 'px';
  });
}
