//! Live progress: bars on a terminal, plain lines elsewhere, or JSON lines.

mod lines;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use stoker_api::experiment::{DesiredState, Phase};
use stoker_api::number;
use stoker_api::trial::CloseCause;
use stoker_engine::experiment::best_metric;
use stoker_engine::trial::{
    SearchedMetric, TrialRecord, closed, granted_units, live_attempt, result_at,
};

use self::lines::{EndTexts, json_line, text_line};
use super::state::{Happening, State};
use crate::print::{self, Output, background};

/// Maximum number of trial lines on a terminal; more would scroll out of view.
const TRIAL_LINES_MAX: usize = 24;
/// Minimum interval between two drawings, which sort all trials.
const DRAW_INTERVAL: Duration = Duration::from_millis(100);
/// Width of a progress bar, in characters.
const BAR_CHARS: u64 = 20;

/// Progress display of a run.
#[derive(Debug)]
pub(crate) enum View {
    /// Bars on a terminal.
    Bars(Bars),
    /// Plain lines for a file or a pipe.
    Lines(EndTexts),
    /// JSON lines.
    Json,
}

/// One line per trial, sorted by the metric.
#[derive(Debug)]
pub(crate) struct Bars {
    multi: MultiProgress,
    /// Lines on the terminal. Only the thread that writes the output locks them.
    lines: Arc<Mutex<Vec<ProgressBar>>>,
    /// First observation of each trial's attempt: attempt, time, batches.
    first_seen: BTreeMap<u32, (u32, Instant, u64)>,
    drawn_at: Option<Instant>,
    ends: EndTexts,
}

impl View {
    /// Creates the view for this output format.
    pub(crate) fn new(output: Output) -> Self {
        let is_terminal = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        match output {
            Output::Json => Self::Json,
            Output::Text if is_terminal => Self::Bars(Bars {
                multi: MultiProgress::new(),
                lines: Arc::default(),
                first_seen: BTreeMap::new(),
                drawn_at: None,
                ends: EndTexts::default(),
            }),
            Output::Text => Self::Lines(EndTexts::default()),
        }
    }

    /// Prints a human-readable message, never to standard output.
    pub(crate) fn print_message(&self, text: &str) {
        match self {
            Self::Bars(bars) => bars.print_above(text.to_owned()),
            Self::Lines(_) | Self::Json => print::err(text),
        }
    }

    /// Shows the events since the last call, and the current state of all trials if it was shown
    /// some time ago.
    pub(crate) fn update(&mut self, state: &mut State, ranking: &MetricRanking<'_>) {
        for (index, event) in std::mem::take(&mut state.happenings) {
            match self {
                Self::Json => print::out(json_line(index, &event)),
                Self::Lines(ends) => print::out(text_line(index, &event, ends)),
                Self::Bars(bars) if is_shown_above_bars(&event) => {
                    let line = text_line(index, &event, &mut bars.ends);
                    bars.print_above(line);
                }
                Self::Bars(_) => {}
            }
        }
        if let Self::Bars(bars) = self
            && !background::is_behind()
            && bars.drawn_at.is_none_or(|drawn_at| drawn_at.elapsed() >= DRAW_INTERVAL)
        {
            bars.draw(state, ranking);
            bars.drawn_at = Some(Instant::now());
        }
    }

    /// Clears the bars before the table of results is printed.
    pub(crate) fn finish(&self) {
        if let Self::Bars(bars) = self {
            bars.clear();
        }
    }
}

/// Ranking of trials by the searched metric.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MetricRanking<'a> {
    /// Name of the metric.
    pub(crate) metric: &'a str,
    /// Whether smaller values are better.
    pub(crate) smaller_is_better: bool,
}

impl MetricRanking<'_> {
    /// Returns a trial's metric: the result at the granted length, else the metric of the latest
    /// validation. A trial that stopped early counts with its best metric.
    pub(crate) fn metric_of(&self, trial: &TrialRecord) -> Option<String> {
        let units = granted_units(&trial.spec);
        if let Some(result) = result_at(trial, units) {
            return Some(result.metric.clone());
        }
        if closed(trial) == Some(CloseCause::StoppedEarly) {
            return trial.status.best_metric.clone();
        }
        let searched = SearchedMetric {
            name: self.metric,
            smaller_is_better: self.smaller_is_better,
            others: &[],
            is_copied: false,
        };
        searched.of(&trial.status.metrics).cloned()
    }

    /// Returns the metric by which trials are compared: the best result, or a better validation of
    /// a trial that stopped early.
    pub(crate) fn best_of(&self, trial: &TrialRecord) -> Option<String> {
        best_metric(trial, self.smaller_is_better)
    }

    /// Returns `true` if the best result of any trial is not its metric, because the trial trained
    /// to several lengths.
    pub(crate) fn has_other_best(&self, trials: &[&TrialRecord]) -> bool {
        let differs = |trial: &&TrialRecord| {
            self.best_of(trial).is_some_and(|best| self.metric_of(trial).as_ref() != Some(&best))
        };
        trials.iter().any(differs)
    }

    /// Compares trials by their best results, the better one first. Trials without a result are
    /// last, and are compared by their metrics.
    pub(crate) fn compare(&self, a: &TrialRecord, b: &TrialRecord) -> Ordering {
        let by_best =
            self.key(self.best_of(a).as_deref()).total_cmp(&self.key(self.best_of(b).as_deref()));
        by_best
            .then_with(|| self.sort_key(a).total_cmp(&self.sort_key(b)))
            .then(a.spec.index.cmp(&b.spec.index))
    }

    /// Returns a sort key: smaller for a better metric, infinity without a metric.
    fn sort_key(&self, trial: &TrialRecord) -> f64 {
        self.key(self.metric_of(trial).as_deref())
    }

    fn key(&self, metric: Option<&str>) -> f64 {
        let metric = metric.and_then(number::parse);
        let metric = metric.filter(|metric| !metric.is_nan());
        let sign = if self.smaller_is_better { 1.0 } else { -1.0 };
        metric.map_or(f64::INFINITY, |metric| sign * metric)
    }
}

impl Bars {
    fn draw(&mut self, state: &State, ranking: &MetricRanking<'_>) {
        let mut trials: Vec<&TrialRecord> = state.trials.values().collect();
        trials.sort_by(|a, b| ranking.sort_key(a).total_cmp(&ranking.sort_key(b)));
        if trials.len() > TRIAL_LINES_MAX {
            // Prefer running trials.
            trials.sort_by_key(|trial| live_attempt(trial).is_none());
            trials.truncate(TRIAL_LINES_MAX);
            trials.sort_by(|a, b| ranking.sort_key(a).total_cmp(&ranking.sort_key(b)));
        }
        let mut texts: Vec<String> = trials.iter().map(|trial| self.line(trial, ranking)).collect();
        let status = state.experiment.status.as_ref();
        let paused = match state.desired_state() {
            DesiredState::Paused => "; paused",
            _ => "",
        };
        texts.push(format!(
            "{}: {} of {} trials ended, {:.0} % of the search{paused}",
            state.name(),
            status.map_or(0, |status| status.trials_closed),
            state.trials.len(),
            100.0 * state.progress()
        ));
        let (multi, lines) = (self.multi.clone(), self.lines.clone());
        background::run(move || draw_lines(&multi, &mut locked(&lines), texts));
    }

    /// Prints a line above the bars.
    fn print_above(&self, line: String) {
        let multi = self.multi.clone();
        background::run(move || {
            let _ = multi.println(line);
        });
    }

    fn clear(&self) {
        let (multi, lines) = (self.multi.clone(), self.lines.clone());
        background::run(move || {
            // An unfinished bar would be drawn again on drop.
            locked(&lines).iter().for_each(ProgressBar::finish_and_clear);
            let _ = multi.clear();
        });
    }

    fn line(&mut self, trial: &TrialRecord, ranking: &MetricRanking<'_>) -> String {
        let status = &trial.status;
        let metric = ranking.metric_of(trial).unwrap_or_else(|| "-".to_owned());
        let eta = self
            .eta(trial)
            .map_or_else(String::new, |left| format!("  {} left", format_duration(left)));
        format!(
            "trial {:<4} {:<9} {}  {} {:<9}  {:>8}/{:<8}{}",
            trial.spec.index,
            phase(trial),
            bar(status.batches, status.batches_total),
            ranking.metric,
            format_metric(&metric),
            status.batches,
            status.batches_total,
            eta
        )
    }

    fn eta(&mut self, trial: &TrialRecord) -> Option<Duration> {
        let attempt = live_attempt(trial)?;
        let (index, status) = (trial.spec.index, &trial.status);
        let now = (attempt, Instant::now(), status.batches);
        let first_seen = self.first_seen.entry(index).or_insert(now);
        if first_seen.0 != attempt || status.batches < first_seen.2 {
            *first_seen = now;
        }
        let done = status.batches - first_seen.2;
        let left = status.batches_total.checked_sub(status.batches)?;
        let seconds = first_seen.1.elapsed().as_secs_f64() * left as f64 / done as f64;
        // `None` for infinite or too large values, for example before the first batch.
        Duration::try_from_secs_f64(seconds).ok()
    }
}

fn draw_lines(multi: &MultiProgress, lines: &mut Vec<ProgressBar>, texts: Vec<String>) {
    while lines.len() < texts.len() {
        let style = ProgressStyle::with_template("{wide_msg}");
        let line = ProgressBar::new_spinner();
        line.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        lines.push(multi.add(line));
    }
    for (line, text) in lines.iter().zip(texts) {
        line.set_message(text);
        line.tick();
    }
}

fn locked(lines: &Mutex<Vec<ProgressBar>>) -> MutexGuard<'_, Vec<ProgressBar>> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns `true` if the event is printed even while bars show the state of all trials.
fn is_shown_above_bars(event: &Happening) -> bool {
    match event {
        Happening::Ended { .. } => true,
        Happening::Started { refused, .. } => !refused.is_empty(),
        Happening::Validated { .. } | Happening::Checkpointed { .. } => false,
    }
}

fn phase(trial: &TrialRecord) -> &'static str {
    match trial.status.phase {
        Phase::Pending => "pending",
        Phase::Running if live_attempt(trial).is_none() => "waiting",
        Phase::Running => "running",
        Phase::Paused => "paused",
        Phase::Completed => "completed",
        Phase::Failed => "failed",
        Phase::Cancelled => "cancelled",
    }
}

fn bar(done: u64, total: u64) -> String {
    let full = (done.min(total) * BAR_CHARS).checked_div(total).unwrap_or(0) as usize;
    format!("[{}{}]", "=".repeat(full), " ".repeat(BAR_CHARS as usize - full))
}

/// Formats a metric with the digits that fit in a table.
pub(crate) fn format_metric(metric: &str) -> String {
    match number::parse(metric) {
        Some(value) if value != 0.0 && (value.abs() < 1e-3 || value.abs() >= 1e6) => {
            format!("{value:.3e}")
        }
        Some(value) => format!("{value:.5}"),
        None => metric.to_owned(),
    }
}

fn format_duration(left: Duration) -> String {
    let seconds = left.as_secs();
    match seconds / 3600 {
        0 => format!("{}:{:02}", seconds / 60, seconds % 60),
        hours => format!("{hours}:{:02}:{:02}", seconds / 60 % 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_width_is_constant() {
        assert_eq!(bar(0, 0), format!("[{}]", " ".repeat(20)));
        assert_eq!(bar(5, 10), format!("[{}{}]", "=".repeat(10), " ".repeat(10)));
        assert_eq!(bar(20, 10), format!("[{}]", "=".repeat(20)));
    }

    #[test]
    fn skipped_checkpoint_is_shown_with_its_reason() {
        let refused = [("b".to_owned(), "model is missing".to_owned())].into();
        let started = Happening::Started { attempt: 1, from: Some("a".to_owned()), refused };
        let text = "trial 3: attempt 1 started from checkpoint a; checkpoint b was skipped: model \
                    is missing";
        assert_eq!(text_line(3, &started, &mut EndTexts::default()), text);
        assert!(is_shown_above_bars(&started));
    }

    #[test]
    fn metrics_and_times_are_short() {
        assert_eq!(format_metric("0.97123456"), "0.97123");
        assert_eq!(format_metric("0.0000012"), "1.200e-6");
        assert_eq!(format_metric("NaN"), "NaN");
        assert_eq!(format_duration(Duration::from_secs(65)), "1:05");
        assert_eq!(format_duration(Duration::from_secs(3665)), "1:01:05");
    }
}
