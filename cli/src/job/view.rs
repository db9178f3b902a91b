//! Progress of a job: a bar on a terminal, plain lines elsewhere, or JSON lines.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use stoker_api::inference::Role;
use stoker_api::trial::AttemptEnd;

use super::runner::stage_name;
use crate::cluster::job::{EMPTY_INPUT, end_word};
use crate::print::{self, Output, background};

/// Minimum interval between progress lines, without a bar.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// Progress display of a job.
#[derive(Debug)]
pub(super) struct View {
    output: Output,
    bar: Option<ProgressBar>,
    /// Role of the process in each slot.
    running: BTreeMap<u32, Role>,
    /// Time and row count of the last progress line.
    last_progress: Option<(Instant, u64)>,
}

impl View {
    /// Creates the view for this output format.
    pub(super) fn new(output: Output) -> Self {
        let is_terminal = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
        let bar = (output == Output::Text && is_terminal).then(|| {
            let bar = ProgressBar::new(0);
            let style = "{msg} {wide_bar} {human_pos} of {human_len} rows, {eta} left";
            ProgressStyle::with_template(style).map(|style| bar.set_style(style)).ok();
            bar
        });
        Self { output, bar, running: BTreeMap::new(), last_progress: None }
    }

    /// Prints a human-readable message to standard error.
    pub(super) fn print_message(&self, text: &str) {
        let text = text.to_owned();
        match self.bar.clone() {
            Some(bar) => background::run(move || bar.suspend(|| print::err(text))),
            None => print::err(text),
        }
    }

    /// Reports the start of a process.
    pub(super) fn started(&mut self, role: Role, slot: u32, attempt: u32) {
        self.running.insert(slot, role);
        if self.output == Output::Json {
            print::out(json!({"event": "started", "role": role, "slot": slot, "attempt": attempt}));
        }
    }

    /// Reports the exit of a process.
    pub(super) fn ended(
        &mut self,
        slot: u32,
        attempt: u32,
        end: AttemptEnd,
        message: Option<&str>,
    ) {
        let role = self.running.remove(&slot).unwrap_or_default();
        if self.output == Output::Json {
            print::out(json!({"event": "ended", "role": role, "slot": slot, "attempt": attempt,
                "end": end, "message": message}));
        } else if end != AttemptEnd::Completed {
            let message = message.map_or_else(String::new, |message| format!(": {message}"));
            self.print_message(&format!(
                "{} (attempt {attempt}) ended: {}{message}",
                stage_name(role, slot),
                end_word(end)
            ));
        }
    }

    /// Reports the number of committed rows.
    pub(super) fn progress(&mut self, rows: u64, total: u64, num_running: usize) {
        if let Some(bar) = &self.bar {
            let bar = bar.clone();
            if !background::is_behind() {
                background::run(move || {
                    bar.set_length(total);
                    bar.set_position(rows);
                    bar.set_message(format!("{num_running} running"));
                });
            }
            return;
        }
        let is_due = self
            .last_progress
            .is_none_or(|(at, last)| at.elapsed() > PROGRESS_INTERVAL && last != rows);
        if is_due {
            self.last_progress = Some((Instant::now(), rows));
            match self.output {
                Output::Json => print::out(json!({"event": "progress", "rows": rows, "of": total})),
                Output::Text => print::out(format!("{rows} of {total} rows")),
            }
        }
    }

    /// Clears the bar before the outcome is printed.
    pub(super) fn finish(&self) {
        if let Some(bar) = self.bar.clone() {
            background::run(move || bar.finish_and_clear());
        }
    }

    /// Prints the final state of the job. `remedy` tells how to resume a stopped one.
    pub(super) fn outcome(&self, outcome: &Value, remedy: &str) {
        if outcome["manifest"].is_string() && outcome["inputRows"] == 0 {
            print::err(EMPTY_INPUT);
        }
        if self.output == Output::Json {
            print::out(outcome);
            return;
        }
        let text = |name: &str| outcome[name].as_str().unwrap_or_default().to_owned();
        match outcome["manifest"].as_str() {
            Some(manifest) => print::out(format!(
                "{} of {} rows written, {} rejected: {manifest}",
                outcome["rows"], outcome["inputRows"], outcome["rejected"]
            )),
            None if outcome["phase"] == "Failed" => {
                print::err(format!("failed: {}", text("message")))
            }
            None if outcome["phase"] == "Cancelled" => print::err(format!(
                "{} with {} of {} rows done",
                text("message"),
                outcome["done"],
                outcome["inputRows"]
            )),
            None => print::err(format!(
                "stopped with {} of {} rows done; {remedy}",
                outcome["done"], outcome["inputRows"]
            )),
        }
    }
}
