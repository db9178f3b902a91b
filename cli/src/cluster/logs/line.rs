//! Lines of logs: their times, and the flags that select and show them.

use std::collections::VecDeque;

use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::tag::Tag;
use crate::cluster::text;
use crate::print::{self, Output};

/// Flags of the commands that print logs.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct LogArgs {
    /// Print only the last N lines of each trial, or of a job. With --follow, start with the last N
    /// lines of each pod
    #[arg(long, value_name = "N", help_heading = "Lines")]
    tail: Option<usize>,
    /// Print only lines since this time: a duration before now, such as 90s or 1h30m, or a time,
    /// such as 2026-11-21T19:00:00Z. Exact for pods. Stored lines have no times: an object with up
    /// to 512 KiB of lines is printed whole if it was written since then
    #[arg(long, value_name = "TIME", value_parser = parse_since, help_heading = "Lines")]
    since: Option<Timestamp>,
    /// Start each line with its time. Lines from the storage start with `[stored=TIME]`, the time
    /// at which their object of up to 512 KiB was last written
    #[arg(long, help_heading = "Lines")]
    timestamps: bool,
}

impl LogArgs {
    /// Returns the first time to print.
    pub(super) fn since(&self) -> Option<Timestamp> {
        self.since
    }

    /// Returns the number of last lines to request from a pod.
    pub(super) fn tail_lines(&self) -> Option<i64> {
        self.tail.map(|num| i64::try_from(num).unwrap_or(i64::MAX))
    }
}

fn parse_since(text: &str) -> Result<Timestamp, String> {
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    let length = text::parse_length(text).map_err(|_| {
        format!(
            "invalid time {text:?}; write a duration such as 90s, 5m or 1h30m, or a time such as \
             2026-11-21T19:00:00Z"
        )
    })?;
    let seconds = i64::try_from(length.as_secs()).ok();
    let since = seconds.and_then(|seconds| text::now().0.checked_sub(seconds));
    since
        .and_then(|since| Timestamp::from_second(since).ok())
        .ok_or_else(|| format!("duration {text:?} is too long"))
}

/// Time of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineTime {
    /// When the program printed the line.
    Printed(Timestamp),
    /// When the line was stored, after it was printed.
    Stored(Timestamp),
    /// Unknown, for a line of the kubelet, such as an error that ends the log.
    Unknown,
}

/// A line of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogLine {
    pub(super) time: LineTime,
    pub(super) text: String,
}

impl LogLine {
    /// Splits a line of a pod's log into timestamp and text.
    pub(super) fn parse(line: &str) -> Self {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        match first.parse() {
            Ok(time) => Self { time: LineTime::Printed(time), text: rest.to_owned() },
            Err(_) => Self { time: LineTime::Unknown, text: line.to_owned() },
        }
    }

    /// Returns when the program printed the line, if known.
    pub(super) fn printed(&self) -> Option<Timestamp> {
        match self.time {
            LineTime::Printed(time) => Some(time),
            LineTime::Stored(_) | LineTime::Unknown => None,
        }
    }
}

/// Prints the selected lines of a trial or job.
#[derive(Debug)]
pub(crate) struct LogPrinter {
    args: LogArgs,
    rank: Option<u32>,
    output: Output,
    /// Last lines, printed at the end, if `--tail` limits their number.
    kept: VecDeque<String>,
    keeps: Option<usize>,
}

impl LogPrinter {
    /// Creates a printer of the lines of `rank`, or of all ranks.
    pub(crate) fn new(args: LogArgs, rank: Option<u32>, output: Output) -> Self {
        Self { args, rank, output, kept: VecDeque::new(), keeps: args.tail }
    }

    /// Prints each line at once: with `--follow`, another part selects the last lines.
    pub(crate) fn following(self) -> Self {
        Self { keeps: None, ..self }
    }

    /// Adds a line.
    pub(super) fn add(&mut self, tag: &Tag, line: &LogLine) {
        let Some(text) = self.format(tag, line) else { return };
        let Some(num_max) = self.keeps else { return print::show(text) };
        self.kept.push_back(text);
        if self.kept.len() > num_max {
            self.kept.pop_front();
        }
    }

    /// Prints the lines that were kept.
    pub(crate) fn finish(self) {
        self.kept.into_iter().for_each(print::out);
    }

    fn format(&self, tag: &Tag, line: &LogLine) -> Option<String> {
        let time = match line.time {
            LineTime::Printed(time) | LineTime::Stored(time) => Some(time),
            LineTime::Unknown => None,
        };
        if self.args.since.is_some_and(|since| time.is_some_and(|time| time < since)) {
            return None;
        }
        match self.output {
            Output::Text => {
                let text = tag.text(&line.text, self.rank)?;
                Some(match (self.args.timestamps, line.time) {
                    (true, LineTime::Printed(time)) => format!("{time} {text}"),
                    (true, LineTime::Stored(time)) => format!("[stored={time}] {text}"),
                    (false, _) | (true, LineTime::Unknown) => text,
                })
            }
            Output::Json => {
                let mut value = tag.json(&line.text, self.rank)?;
                let at = |time: Option<Timestamp>| -> Value {
                    time.map_or(Value::Null, |time| json!(time.to_string()))
                };
                value["time"] = at(line.printed());
                value["storedAt"] = match line.time {
                    LineTime::Stored(time) => at(Some(time)),
                    LineTime::Printed(_) | LineTime::Unknown => Value::Null,
                };
                Some(value.to_string())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tag::Gang;
    use super::*;

    const TAG: Tag = Tag {
        trial: 7,
        attempt: 1,
        pod: 0,
        gang: Gang { world_size: 1, ranks_per_pod: 1 },
        with_trial: true,
        is_job: false,
    };

    fn time(text: &str) -> Timestamp {
        format!("2026-11-21T19:00:{text}Z").parse().unwrap()
    }

    fn line(time: LineTime) -> LogLine {
        LogLine { time, text: "loss 1".to_owned() }
    }

    fn check(args: LogArgs, of: LineTime, output: Output, expected: Option<&str>) {
        let text = LogPrinter::new(args, None, output).format(&TAG, &line(of));
        assert_eq!(text.as_deref(), expected, "{args:?} {of:?}");
    }

    #[test]
    fn times_are_shown_by_their_kind() {
        let args = LogArgs { timestamps: true, ..LogArgs::default() };
        let (printed, stored) = (LineTime::Printed(time("01.5")), LineTime::Stored(time("02")));
        let text = Output::Text;
        check(args, printed, text, Some("2026-11-21T19:00:01.5Z [trial=7] loss 1"));
        check(args, stored, text, Some("[stored=2026-11-21T19:00:02Z] [trial=7] loss 1"));
        check(args, LineTime::Unknown, text, Some("[trial=7] loss 1"));
        check(LogArgs::default(), printed, text, Some("[trial=7] loss 1"));
        let json = LogPrinter::new(args, None, Output::Json).format(&TAG, &line(stored)).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["time"], &json["line"]), (&Value::Null, &json!("loss 1")));
        assert_eq!(json["storedAt"], "2026-11-21T19:00:02Z");
    }

    #[test]
    fn older_lines_are_left_out() {
        let args = LogArgs { since: Some(time("02")), ..LogArgs::default() };
        let text = Output::Text;
        check(args, LineTime::Printed(time("01.9")), text, None);
        check(args, LineTime::Printed(time("02")), text, Some("[trial=7] loss 1"));
        check(args, LineTime::Stored(time("01")), text, None);
        check(args, LineTime::Unknown, text, Some("[trial=7] loss 1"));
    }

    #[test]
    fn tail_keeps_the_last_lines() {
        let args = LogArgs { tail: Some(2), ..LogArgs::default() };
        let mut printer = LogPrinter::new(args, None, Output::Text);
        for text in ["a", "b", "c"] {
            printer.add(&TAG, &LogLine { time: LineTime::Unknown, text: text.to_owned() });
        }
        assert_eq!(printer.kept, ["[trial=7] b", "[trial=7] c"]);
    }

    #[test]
    fn since_is_a_duration_or_a_time() {
        let at = |text: &str| parse_since(text).map(Timestamp::as_second);
        assert_eq!(at("2026-11-21T19:00:00Z"), Ok(time("00").as_second()));
        let hour_ago = text::now().0 - 3600;
        assert!((hour_ago..hour_ago + 60).contains(&at("1h").unwrap()));
        assert!(at("yesterday").unwrap_err().contains("write a duration"));
        assert!(at("99999999999999d").is_err());
    }
}
