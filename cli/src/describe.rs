//! Text of `stoker experiment describe`, for local runs and on a cluster.
//!
//! ```text
//!   fields, conditions          what the experiment is, and how far (this file)
//!   brackets, rungs             what the search does next           (crate::explain)
//!   trials with their reasons                                       (trials)
//!   importance                                                      (importance)
//! ```

mod importance;
mod trials;

use serde_json::json;
use stoker_api::condition::Condition;
use stoker_api::experiment::{DesiredState, Experiment, ExperimentSpec, Phase, Searcher};
use stoker_api::time::Timestamp;
use stoker_engine::experiment::explain::length;
use stoker_engine::trial::TrialRecord;

pub(crate) use self::importance::{Explained as ExplainedImportance, of as importance};
use self::trials::TrialTable;
use crate::cluster::text::{self, Fields};
use crate::explain::Explained;
use crate::run;

/// Maximum number of failed trials shown with their messages.
const FAILURES_MAX: usize = 5;

/// An experiment with all that its description shows.
pub(crate) struct Description<'a> {
    pub(crate) experiment: &'a Experiment,
    /// Trials by index.
    pub(crate) trials: &'a [&'a TrialRecord],
    pub(crate) explained: &'a Explained,
    pub(crate) importance: &'a ExplainedImportance,
    /// Phase in one word.
    pub(crate) phase: String,
    /// Location of the experiment's files.
    pub(crate) storage: String,
    /// Returns the location of a trial's checkpoint.
    pub(crate) checkpoint: &'a dyn Fn(u32, &str) -> String,
    /// Name in commands: of the experiment, or the ID of a local run.
    pub(crate) id: &'a str,
    pub(crate) is_local: bool,
    pub(crate) now: Timestamp,
}

impl std::fmt::Display for Description<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let searcher = &self.experiment.spec.searcher;
        let status = self.experiment.status.as_ref();
        let listed = status.map_or(&[][..], |status| &status.conditions);
        f.write_str(&self.fields().to_string())?;
        f.write_str(&conditions(listed, self.now))?;
        f.write_str(&self.explained.search_sections())?;
        f.write_str(&self.trials().section(searcher, self.id))?;
        f.write_str(&self.importance.section(&searcher.metric))
    }
}

impl Description<'_> {
    fn trials(&self) -> TrialTable<'_> {
        TrialTable { trials: self.trials, explained: self.explained }
    }

    fn fields(&self) -> Fields {
        let (metadata, spec) = (&self.experiment.metadata, &self.experiment.spec);
        let status = self.experiment.status.clone().unwrap_or_default();
        let since = |time: Timestamp| format!("{time} ({} ago)", text::age(Some(time), self.now));
        let message = status.message.map_or_else(String::new, |message| format!(": {message}"));
        let mut fields = Fields::default();
        fields.add("Name", metadata.name.clone().unwrap_or_default());
        match self.is_local {
            true => fields.add("Run", self.id),
            false => fields.add("Namespace", metadata.namespace.clone().unwrap_or_default()),
        }
        fields.add("Description", spec.description.clone().unwrap_or_default());
        fields.add("Labels", spec.labels.join(", "));
        fields.add("Created", text::created(metadata).map(since).unwrap_or_default());
        fields.add("Ended", status.ended_at.map(since).unwrap_or_default());
        if !self.is_local || spec.state != DesiredState::Active {
            fields.add("Desired", desired(spec.state));
        }
        fields.add("Phase", format!("{}{message}", self.phase));
        fields.add("Progress", format!("{}%", status.progress_percent));
        fields.add("Search", search(&spec.searcher));
        fields.add("Program", program(spec, self.is_local));
        if !self.is_local {
            fields.add("Pods", pods(spec));
        }
        fields.add("Storage", self.storage.clone());
        fields.add("Trials", self.trials().counts());
        fields.add("Best", self.best());
        fields.add("Pareto front", run::pareto(&spec.searcher, &status.pareto).join("\n"));
        fields.add("Failures", failures(self.trials));
        fields
    }

    fn best(&self) -> String {
        let status = self.experiment.status.as_ref();
        let Some(best) = status.and_then(|status| status.best.as_ref()) else {
            return String::new();
        };
        let metric = &self.experiment.spec.searcher.metric;
        let mut lines = vec![format!("trial {} with {metric} {}", best.index, best.metric)];
        if let Some(trial) = self.trials.iter().find(|trial| trial.spec.index == best.index) {
            let values = run::hyperparameters(&trial.spec.hyperparameters);
            lines.push(format!("hyperparameters: {values}"));
        }
        if let Some(name) = &best.checkpoint {
            lines.push(format!("checkpoint: {}", (self.checkpoint)(best.index, name)));
        }
        lines.join("\n")
    }
}

/// Returns a state as it is spelled in the spec.
pub(crate) fn desired(state: DesiredState) -> String {
    json!(state).as_str().unwrap_or_default().to_owned()
}

fn search(searcher: &Searcher) -> String {
    let method = searcher.methods_set().first().copied().unwrap_or_default();
    let settings = json!(searcher)[method].clone();
    let number = |name: &str| settings[name].as_u64().filter(|number| *number > 0);
    let counted = |name: &str, noun: &str| {
        let plural = |num: u64| if num == 1 { "" } else { "s" };
        number(name).map(|num| format!(", {num} {noun}{}", plural(num)))
    };
    let trials = counted("maxTrials", "trial");
    let concurrent = number("maxConcurrentTrials").map(|num| format!(", {num} concurrent"));
    let population = number("populationSize").map(|num| format!(", population of {num}"));
    let rounds = counted("numRounds", "round");
    let size: String = [trials, population, rounds].into_iter().flatten().collect();
    let kind = format!("{method}{size}");
    let length = searcher.length().map(|(unit, units)| format!(", {} each", length(units, unit)));
    let better = if searcher.smaller_is_better { "smaller" } else { "larger" };
    let (concurrent, length) = (concurrent.unwrap_or_default(), length.unwrap_or_default());
    format!("{kind}{concurrent}{length}; {}, {better} is better", searcher.metric)
}

fn program(spec: &ExperimentSpec, is_local: bool) -> String {
    let words: Vec<&str> =
        spec.entrypoint.command.iter().chain(&spec.entrypoint.args).map(String::as_str).collect();
    let words = words.join(" ");
    if is_local {
        return words;
    }
    let image = spec.pod.image.as_deref().unwrap_or("the stock image");
    let uploaded = spec.context.as_ref().map(|context| {
        let sha256 = &context.sha256;
        format!(", with uploaded files {}", sha256.get(..12).unwrap_or(sha256))
    });
    format!("{words} in {image}{}", uploaded.unwrap_or_default())
}

fn pods(spec: &ExperimentSpec) -> String {
    let resources = &spec.resources;
    let slot = resources.slot_resource.as_deref().unwrap_or("CPU rank");
    let num_slots = resources.slots_per_pod();
    let plural = if num_slots == 1 { "" } else { "s" };
    format!("{} per trial, with {num_slots} slot{plural} ({slot}) each", resources.num_pods())
}

fn failures(trials: &[&TrialRecord]) -> String {
    let failed: Vec<&&TrialRecord> =
        trials.iter().filter(|trial| trial.status.phase == Phase::Failed).collect();
    let mut lines: Vec<String> = failed
        .iter()
        .take(FAILURES_MAX)
        .map(|trial| {
            let message = trial.status.message.as_deref().unwrap_or("no message");
            format!("trial {}: {message}", trial.spec.index)
        })
        .collect();
    if failed.len() > FAILURES_MAX {
        lines.push(format!("and {} more", failed.len() - FAILURES_MAX));
    }
    lines.join("\n")
}

/// Formats conditions as a table.
pub(crate) fn conditions(conditions: &[Condition], now: Timestamp) -> String {
    let row = |condition: &Condition| {
        vec![
            condition.type_.clone(),
            format!("{:?}", condition.status),
            condition.reason.clone(),
            text::age(Some(condition.last_transition_time), now),
            condition.message.replace('\n', " "),
        ]
    };
    let rows: Vec<Vec<String>> = conditions.iter().map(row).collect();
    text::section("Conditions", &["TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"], &rows)
}

#[cfg(test)]
mod tests;
