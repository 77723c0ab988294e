// Steps as the progress bar numbers them: from 1 in each stage. Files and metrics.jsonl count through all stages.

const stagesOf = (run) => run.stages.map(([n, name, first, last]) => ({
  name: run.stages.length > 1 ? `${n} ${visible(name)}` : "", kind: name, start: first - 1, end: last,
}));
// the step at which the axis of every chart begins: the first step of reinforcement, or of the last stage
const originOf = (run) => {
  const stages = stagesOf(run);
  return (stages.find((stage) => stage.kind === "reinforce") ?? stages.at(-1) ?? { start: 0 }).start;
};
// spans of the stages on that axis; [] if the runs have different stages
const spansOf = (runs) => {
  const all = runs.map((run) => stagesOf(run).map((stage) => ({ ...stage, start: stage.start - originOf(run), end: stage.end - originOf(run) })));
  const layout = (spans) => JSON.stringify(spans.map(({ name, start }) => [name, start])); // runs may differ in length
  const longest = all.toSorted((a, b) => (b.at(-1)?.end ?? 0) - (a.at(-1)?.end ?? 0))[0];
  return all.every((spans) => layout(spans) === layout(longest)) ? longest : [];
};
// an evaluation at the end of a stage is also the one before the next stage
const stepLabel = (run, step, evaluation = false) => {
  const stages = stagesOf(run);
  const stage = stages.findLast((x) => step > x.start || (evaluation && step === x.start)) ?? stages[0];
  if (!stage?.name) return `step ${step}`;
  return `${stage.name}, step ${step - stage.start}/${stage.end - stage.start}`;
};
