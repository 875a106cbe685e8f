// uPlot formats numbers in the language of the browser. Under a POSIX locale that is "en-US@posix", which is no tag of
// a language, and uPlot would not load.
try {
  Intl.getCanonicalLocales(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en" });
}
