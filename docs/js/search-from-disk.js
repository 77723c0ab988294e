// Search on pages that were opened from disk: browsers refuse a Worker there, so the search script
// of Material runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (address) => new Promise((done) => {
        const script = inside.document.createElement("script");
        script.src = address;
        script.onload = done;
        inside.document.head.append(script);
      });
      inside.importScripts = (...addresses) => Promise.all(addresses.map(load));
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = load(url).then(() => inside);
    }

    postMessage(data) {
      this.loaded.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
