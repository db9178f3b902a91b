//! Part of a pod's log to request, and the position in it across connections.

use std::cmp::Ordering;

use k8s_openapi::jiff::Timestamp;
use kube::api::LogParams;

use super::line::{LogArgs, LogLine};
use super::tag::Gang;

/// Part of a pod's log to request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LogRequest {
    /// Number of last lines; `None` for all.
    tail_lines: Option<i64>,
    since: Option<Timestamp>,
}

impl LogRequest {
    /// Requests what the flags select. A pod cannot select lines by rank, so the printer selects
    /// the last lines of one rank.
    pub(super) fn new(args: &LogArgs, gang: Gang, rank: Option<u32>) -> Self {
        let is_mixed = rank.is_some() && gang.ranks_per_pod > 1;
        Self { tail_lines: args.tail_lines().filter(|_| !is_mixed), since: args.since() }
    }

    /// Returns the parameters of a request.
    pub(super) fn params(self, container: &str, follow: bool) -> LogParams {
        LogParams {
            container: Some(container.to_owned()),
            follow,
            timestamps: true,
            tail_lines: self.tail_lines,
            since_time: self.since.and_then(to_seconds),
            ..LogParams::default()
        }
    }
}

/// Rounds down to seconds. The client would round to the nearest second, and skip lines.
fn to_seconds(time: Timestamp) -> Option<Timestamp> {
    Timestamp::from_second(time.as_second()).ok()
}

/// Position in a pod's log. After a reconnect, the server repeats lines, because `sinceTime` has a
/// resolution of seconds. The cursor distinguishes them from new lines.
#[derive(Debug, Default)]
pub(super) struct LogCursor {
    /// Latest timestamp of the lines that were read.
    latest: Option<Timestamp>,
    /// Number of lines that were read with this timestamp. Some container runtimes give all lines
    /// of one write the same timestamp.
    num_at_latest: usize,
    /// Number of these lines that the connection has yet to repeat; `None` after a new line.
    num_to_repeat: Option<usize>,
    /// Last line without a timestamp, unless a new line with one followed it.
    unstamped: Option<String>,
}

impl LogCursor {
    /// Returns the request for a new connection, which continues after the lines that were read.
    pub(super) fn request(&self, first: LogRequest) -> LogRequest {
        match self.latest {
            Some(latest) => LogRequest { tail_lines: None, since: Some(latest) },
            None => first,
        }
    }

    /// Prepares for a new connection, which starts at or before `latest`.
    pub(super) fn reconnect(&mut self) {
        self.num_to_repeat = Some(self.num_at_latest);
    }

    /// Advances by a line. Returns `true` if the line is new.
    pub(super) fn advance(&mut self, line: &LogLine) -> bool {
        let Some(time) = line.printed() else {
            // Each connection repeats an error of the kubelet until its cause has passed.
            let is_new = self.unstamped.as_ref() != Some(&line.text);
            self.unstamped = Some(line.text.clone());
            return is_new;
        };
        let order = Some(time).cmp(&self.latest);
        if let Some(num_left) = &mut self.num_to_repeat {
            match order {
                Ordering::Less => return false,
                Ordering::Equal if *num_left > 0 => {
                    *num_left -= 1;
                    return false;
                }
                Ordering::Equal | Ordering::Greater => self.num_to_repeat = None,
            }
        }
        self.unstamped = None;
        match order {
            // Standard output and standard error are logged concurrently, so a line may be late.
            Ordering::Less => {}
            Ordering::Equal => self.num_at_latest += 1,
            Ordering::Greater => (self.latest, self.num_at_latest) = (Some(time), 1),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_skips_only_repeated_lines() {
        // Lines of each connection, and whether the lines are new. A line is the second of its
        // timestamp, or else a line without a timestamp. At the end, `latest` is the cursor's time.
        let check = |latest: &str, connections: &[&[(&str, bool)]]| {
            let mut cursor = LogCursor::default();
            let time = |second: &str| format!("2026-01-01T00:00:0{second}00000000Z");
            for connection in connections {
                cursor.reconnect();
                for (text, is_new) in *connection {
                    let line = match text.contains('.') {
                        true => LogLine::parse(&format!("{} x", time(text))),
                        false => LogLine::parse(text),
                    };
                    assert_eq!(cursor.advance(&line), *is_new, "{text} {connections:?}");
                }
            }
            let expected = (!latest.is_empty()).then(|| time(latest).parse().unwrap());
            assert_eq!(cursor.latest, expected, "{connections:?}");
        };
        let new = |time| (time, true);
        let repeated = |time| (time, false);
        check("1.2", &[&[new("1.1"), new("1.1"), new("1.2"), new("1.2")]]);
        check("1.3", &[&[new("1.1"), new("1.2")], &[repeated("1.1"), repeated("1.2"), new("1.3")]]);
        check("1.1", &[&[new("1.1"), new("1.1")], &[repeated("1.1"), repeated("1.1"), new("1.1")]]);
        check(
            "1.2",
            &[&[new("1.2")], &[repeated("1.2"), new("1.2")], &[repeated("1.2"), repeated("1.2")]],
        );
        // Late lines count only on the connection that reads them first.
        check("1.3", &[&[new("1.2"), new("1.1")], &[repeated("1.2"), repeated("1.1"), new("1.3")]]);
        check("1.2", &[&[new("1.2"), new("1.1"), new("1.2")], &[repeated("1.2"), repeated("1.1")]]);
        // The server may have deleted the lines that were read.
        check("1.2", &[&[new("1.1"), new("1.1")], &[new("1.2"), new("1.2")]]);
        // A line of the kubelet has no timestamp. It is shown once, and moves nothing.
        let error = "unable to retrieve container logs";
        check("", &[&[new(error)], &[repeated(error)]]);
        check("1.1", &[&[new(error)], &[new("1.1")]]);
        check("1.1", &[&[new("1.1"), new(error)], &[repeated("1.1"), repeated(error)]]);
        check("1.2", &[&[new("1.1"), new(error)], &[repeated("1.1"), new("1.2"), new(error)]]);
        check("1.2", &[&[new("1.1"), new("a"), new("b")], &[repeated("1.1"), new("1.2")]]);
        check(
            "1.1",
            &[&[new("1.1"), new("1.1"), new("2027")], &[repeated("1.1"), repeated("1.1")]],
        );
    }
}
