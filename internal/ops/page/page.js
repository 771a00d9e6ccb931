// Keeps the page fresh: it fetches itself and replaces the parts that have
// changed. Without it the page is complete, and as old as it says.
"use strict";

(() => {
	const every = 2000; // milliseconds between two looks
	const patience = 10000; // until a look counts as failed
	const stale = document.getElementById("stale");
	let failures = 0;

	// swap puts new content into an old section; details stay as the reader
	// left them.
	const swap = (fresh, old) => {
		const open = Array.from(old.querySelectorAll("details"), (d) => d.open);
		if (open.length > 0) {
			fresh.querySelectorAll("details").forEach((d, i) => { if (i < open.length) d.open = open[i]; });
		}
		if (fresh.innerHTML === old.innerHTML) return;
		const scrolled = Array.from(old.querySelectorAll(".wide"), (w) => w.scrollLeft);
		const focused = old.contains(document.activeElement) ? Array.from(old.querySelectorAll("a, summary, [tabindex]")).indexOf(document.activeElement) : -1;
		old.replaceChildren(...fresh.childNodes);
		old.querySelectorAll(".wide").forEach((w, i) => { w.scrollLeft = scrolled[i] || 0; });
		const again = focused < 0 ? undefined : old.querySelectorAll("a, summary, [tabindex]")[focused];
		if (again) again.focus({ preventScroll: true });
	};

	const update = (fresh) => {
		document.title = fresh.title;
		const head = document.getElementById("head");
		const newHead = fresh.getElementById("head");
		if (newHead) swap(newHead, head);
		const main = document.querySelector("main");
		const newMain = fresh.querySelector("main");
		if (!newMain) return;
		const old = new Map(Array.from(main.children, (s) => [s.id, s]));
		let place = main.firstElementChild;
		for (const section of Array.from(newMain.children)) {
			const there = old.get(section.id);
			if (there) {
				swap(section, there);
				old.delete(section.id);
			}
			// What is in its place stays untouched: moving it would lose the focus.
			if (there && there === place) {
				place = place.nextElementSibling;
			} else {
				main.insertBefore(there || section, place);
			}
		}
		old.forEach((gone) => gone.remove());
	};

	const look = async () => {
		try {
			const answer = await fetch(location.pathname, { cache: "no-store", signal: AbortSignal.timeout(patience) });
			if (!answer.ok) throw new Error(`status ${answer.status}`);
			update(new DOMParser().parseFromString(await answer.text(), "text/html"));
			failures = 0;
			stale.textContent = "";
		} catch {
			failures++;
			if (failures === 2) stale.textContent = "The daemon does not answer: what is shown is old.";
		}
		setTimeout(look, document.hidden ? 5 * every : every);
	};
	setTimeout(look, every);
})();
