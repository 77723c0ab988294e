// Color scales that are safe for color-blind readers: one hue that deepens, or orange – neutral – blue.

const RUN_COLORS = ["#3b6fd4", "#e07b39", "#2c9c79", "#9a5fc9", "#c2455d", "#8a7a2e", "#4aa3c7", "#77808c"];
const SCALES = {
  light: { ground: [255, 255, 255], deep: [8, 64, 129], less: [179, 88, 6], more: [33, 92, 172] },
  dark: { ground: [24, 28, 36], deep: [120, 196, 255], less: [240, 150, 60], more: [104, 168, 255] },
};
const mix = (a, b, share) => a.map((x, i) => Math.round(x + (b[i] - x) * share));
const luminance = ([r, g, b]) => {
  const linear = [r, g, b].map((x) => (x / 255 <= 0.03928 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const css = (color) => `rgb(${color.join(",")})`;
// black or white, whichever has more contrast: at least 4.5 to 1 on any background
const ink = (color) => (luminance(color) > 0.179 ? "#000000" : "#ffffff");
const sequential = (share) => {
  const scale = SCALES[isDark() ? "dark" : "light"];
  return mix(scale.ground, scale.deep, clamp(share, 0, 1));
};
const diverging = (share) => {
  const scale = SCALES[isDark() ? "dark" : "light"];
  const strength = clamp(Math.abs(share), 0, 1);
  return mix(scale.ground, share < 0 ? scale.less : scale.more, strength);
};

// Numbers by which tokens can be colored. `share` maps a value to the scale; `ends` label it. A `special`
// number is recorded by few methods and has no button where it is missing.
const COLORINGS = [
  {
    key: "entropy", label: "Entropy", sign: "H", unit: "nats", paint: sequential,
    about: "how uncertain the policy was when it sampled the token",
    scale: (all) => ({ low: 0, high: Math.max(extent(all)[1], 1e-6) }),
    share: (x, s) => x / s.high,
  },
  {
    key: "advantage", label: "Advantage", sign: "Â", unit: "", paint: diverging,
    about: "better (blue) or worse (orange) than expected",
    scale: (all) => { const [a, b] = extent(all); const most = Math.max(Math.abs(a), Math.abs(b), 1e-6); return { low: -most, high: most }; },
    share: (x, s) => x / s.high,
  },
  {
    key: "value", label: "Value", sign: "V", unit: "expected reward", paint: sequential,
    about: "what the critic expected before the token",
    scale: (all) => { const [low, high] = extent(all); return { low, high: Math.max(high, low + 1e-6) }; },
    share: (x, s) => (x - s.low) / (s.high - s.low),
  },
  {
    key: "ratio", label: "Ratio", sign: "π/π_old", unit: "", paint: diverging,
    about: "how the update changed the probability of the token's unit: blue more likely, orange less likely",
    scale: (all) => {
      const most = Math.max(0.01, extent(all.map((x) => (isNumber(x) && x > 0 ? Math.abs(Math.log(x)) : 0)))[1]);
      return { low: Math.exp(-most), high: Math.exp(most), most };
    },
    share: (x, s) => (x > 0 ? Math.log(x) / s.most : -1),
  },
  {
    key: "logp_old", label: "Log-prob", sign: "log π_old", unit: "nats", paint: sequential,
    about: "darker tokens were less likely",
    scale: (all) => ({ low: 0, high: Math.min(extent(all)[0], -1e-6) }),
    share: (x, s) => x / s.high,
  },
  {
    key: "image_kl", label: "Image", sign: "KL", unit: "nats", paint: sequential, special: true,
    about: "how much the token depends on the image: KL to the policy with hidden patches",
    scale: (all) => ({ low: 0, high: Math.max(extent(all)[1], 1e-6) }),
    share: (x, s) => x / s.high,
  },
];
