//! Logs of pods.

use std::cmp::Ordering;
use std::time::Duration;

use futures::{AsyncBufRead, AsyncBufReadExt as _};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, LogParams};
use tokio::sync::mpsc::Sender;

use super::line::{LogArgs, LogLine};
use super::tag::{Gang, Tag};
use crate::cluster::connect::Cluster;
use crate::cluster::trial::pod_state;
use crate::failure::Failure;
use crate::print;

/// Container of the program.
const TRAINER: &str = "trainer";
/// Init container that downloads the program's files.
const SETUP: &str = "setup";
/// Wait before a pod's log is requested again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Shows the current logs of pods, merged by time.
pub(super) async fn print(
    cluster: &Cluster,
    pods: &[(Pod, Tag)],
    request: LogRequest,
    mut show: impl FnMut(&Tag, &LogLine),
) -> Result<(), Failure> {
    let api: Api<Pod> = cluster.api();
    let mut open = Vec::new();
    for (pod, tag) in pods {
        let name = pod.metadata.name.clone().unwrap_or_default();
        let Some(container) = container(pod) else {
            print::err(format!("pod {name} has no logs yet: it is {}", pod_state(pod)));
            continue;
        };
        let params = request.params(container, false);
        let target = format!("the log of pod `{name}`");
        let stream = cluster.request(&target, api.log_stream(&name, &params)).await?;
        let mut reader = Box::pin(stream);
        if let Some(first) = next(&mut reader).await {
            open.push((first, reader, tag));
        }
    }
    // Merge: always show the earliest pending line.
    while let Some(at) = (0..open.len()).min_by_key(|at| open[*at].0.printed()) {
        let (line, reader, tag) = &mut open[at];
        show(tag, line);
        match next(reader).await {
            Some(following) => *line = following,
            None => drop(open.swap_remove(at)),
        }
    }
    Ok(())
}

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

    fn params(self, container: &str, follow: bool) -> LogParams {
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

/// Reads the next line; `None` at the end or if the connection breaks.
async fn next<R: AsyncBufRead + Unpin>(reader: &mut R) -> Option<LogLine> {
    let mut bytes = Vec::new();
    reader.read_until(b'\n', &mut bytes).await.ok().filter(|len| *len > 0)?;
    let text = String::from_utf8_lossy(&bytes);
    Some(LogLine::parse(text.trim_end_matches(['\n', '\r'])))
}

/// Returns the container whose log to read: the init container if it failed, otherwise the
/// program's. `None` if the program has not started.
fn container(pod: &Pod) -> Option<&'static str> {
    let status = pod.status.as_ref()?;
    let state_of = |statuses: &Option<Vec<ContainerStatus>>, name: &str| {
        let mut statuses = statuses.iter().flatten();
        statuses.find(|status| status.name == name).and_then(|status| status.state.clone())
    };
    let has_started = state_of(&status.container_statuses, TRAINER)
        .is_some_and(|state| state.running.is_some() || state.terminated.is_some());
    let setup = state_of(&status.init_container_statuses, SETUP).and_then(|state| state.terminated);
    match (setup, has_started) {
        (Some(setup), _) if setup.exit_code != 0 => Some(SETUP),
        (_, true) => Some(TRAINER),
        _ => None,
    }
}

/// Returns `true` if the pod cannot print more lines.
fn is_over(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return false };
    let has_ended = |container: &ContainerStatus| {
        container.name == TRAINER
            && container.state.as_ref().is_some_and(|state| state.terminated.is_some())
    };
    matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"))
        || status.container_statuses.iter().flatten().any(has_ended)
}

/// Position in a pod's log. After a reconnect, the server repeats lines, because `sinceTime` has a
/// resolution of seconds. The cursor distinguishes them from new lines.
#[derive(Debug, Default)]
struct LogCursor {
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
    fn request(&self, first: LogRequest) -> LogRequest {
        match self.latest {
            Some(latest) => LogRequest { tail_lines: None, since: Some(latest) },
            None => first,
        }
    }

    /// Prepares for a new connection, which starts at or before `latest`.
    fn reconnect(&mut self) {
        self.num_to_repeat = Some(self.num_at_latest);
    }

    /// Advances by a line. Returns `true` if the line is new.
    fn advance(&mut self, line: &LogLine) -> bool {
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

/// Sends the lines of a pod until it has ended or is deleted. After a broken connection, continues
/// after the last line.
pub(super) async fn follow(
    cluster: Cluster,
    pod: Pod,
    tag: Tag,
    request: LogRequest,
    lines: Sender<(Tag, LogLine)>,
) {
    let api: Api<Pod> = cluster.api();
    let name = pod.metadata.name.clone().unwrap_or_default();
    let uid = pod.metadata.uid.clone();
    let mut pod = pod;
    let mut cursor = LogCursor::default();
    loop {
        // Check before reading: if the pod has already ended, this pass reads the complete log.
        let was_over = is_over(&pod);
        if let Some(container) = container(&pod) {
            let params = cursor.request(request).params(container, true);
            if let Ok(stream) = api.log_stream(&name, &params).await {
                let mut reader = Box::pin(stream);
                cursor.reconnect();
                while let Some(line) = next(&mut reader).await {
                    if cursor.advance(&line) && lines.send((tag, line)).await.is_err() {
                        return;
                    }
                }
            }
        }
        if was_over {
            return;
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
        match api.get_opt(&name).await {
            Ok(Some(current)) if current.metadata.uid == uid => pod = current,
            Ok(_) => return,
            // The API server is unavailable: try again.
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(phase: &str, setup: Value, trainer: Value) -> Pod {
        let status = |name: &str, state: Value| {
            json!([{"name": name, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": state}])
        };
        serde_json::from_value(json!({"metadata": {}, "status": {
            "phase": phase,
            "initContainerStatuses": status("setup", setup),
            "containerStatuses": status("trainer", trainer),
        }}))
        .unwrap()
    }

    #[test]
    fn log_is_of_the_program_or_failed_setup() {
        let check = |phase: &str, setup: Value, trainer: Value, expected: (Option<&str>, bool)| {
            let pod = pod(phase, setup, trainer);
            assert_eq!((container(&pod), is_over(&pod)), expected, "{phase}");
        };
        let waits = || json!({"waiting": {"reason": "PodInitializing"}});
        let ended = |code: i32| json!({"terminated": {"exitCode": code}});
        check("Pending", json!({"running": {}}), waits(), (None, false));
        check("Pending", ended(0), waits(), (None, false));
        check("Failed", ended(1), waits(), (Some("setup"), true));
        check("Running", ended(0), json!({"running": {}}), (Some("trainer"), false));
        check("Running", ended(0), ended(1), (Some("trainer"), true));
        check("Succeeded", ended(0), ended(0), (Some("trainer"), true));
    }

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

    #[tokio::test]
    async fn lines_are_split_from_their_timestamps() {
        let bytes = b"2026-11-21T19:00:00.1Z a b\n2026-11-21T21:00:01+02:00 \n\
            2026-11-21T19:00:02Z \xff\r\n2026-11-21T19:00:03Z\nrpc error: a b\n2026 x\n\n\
            2026-11-21T19:00:04Z x";
        let mut reader = futures::io::Cursor::new(&bytes[..]);
        let mut lines = Vec::new();
        while let Some(line) = next(&mut reader).await {
            let time = line.printed().map(|time| time.to_string());
            lines.push((time.unwrap_or_default(), line.text));
        }
        let stamped =
            |time: &str, text: &str| (format!("2026-11-21T19:00:{time}Z"), text.to_owned());
        let unstamped = |text: &str| (String::new(), text.to_owned());
        let expected = [
            stamped("00.1", "a b"),
            stamped("01", ""),
            stamped("02", "\u{fffd}"),
            stamped("03", ""),
            unstamped("rpc error: a b"),
            unstamped("2026 x"),
            unstamped(""),
            stamped("04", "x"),
        ];
        assert_eq!(lines, expected);
    }
}
