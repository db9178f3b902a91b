//! Logs of pods.

use std::cmp::Ordering;
use std::time::Duration;

use futures::{AsyncBufRead, AsyncBufReadExt as _};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::api::{Api, LogParams};
use tokio::sync::mpsc::Sender;

use super::tag::Tag;
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

/// Kubernetes timestamp, and line. Timestamps can be compared as strings: their length is fixed.
type Stamped = (String, String);

/// Shows the current logs of pods, merged by time.
pub(super) async fn print(
    cluster: &Cluster,
    pods: &[(Pod, Tag)],
    mut show: impl FnMut(&Tag, &str),
) -> Result<(), Failure> {
    let api: Api<Pod> = cluster.api();
    let mut open = Vec::new();
    for (pod, tag) in pods {
        let name = pod.metadata.name.clone().unwrap_or_default();
        let Some(container) = container(pod) else {
            print::err(format!("pod {name} has no logs yet: it is {}", pod_state(pod)));
            continue;
        };
        let params = params(container, false);
        let target = format!("the log of pod `{name}`");
        let stream = cluster.request(&target, api.log_stream(&name, &params)).await?;
        let mut reader = Box::pin(stream);
        if let Some(first) = next(&mut reader).await {
            open.push((first, reader, tag));
        }
    }
    // Merge: always show the earliest pending line.
    while let Some(at) = (0..open.len()).min_by(|a, b| open[*a].0.0.cmp(&open[*b].0.0)) {
        let (stamped, reader, tag) = &mut open[at];
        show(tag, &stamped.1);
        match next(reader).await {
            Some(line) => *stamped = line,
            None => drop(open.swap_remove(at)),
        }
    }
    Ok(())
}

fn params(container: &str, follow: bool) -> LogParams {
    let container = Some(container.to_owned());
    LogParams { container, follow, timestamps: true, ..LogParams::default() }
}

/// Reads the next line; `None` at the end or if the connection breaks.
async fn next<R: AsyncBufRead + Unpin>(reader: &mut R) -> Option<Stamped> {
    let mut bytes = Vec::new();
    reader.read_until(b'\n', &mut bytes).await.ok().filter(|len| *len > 0)?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_end_matches(['\n', '\r']);
    let (time, line) = text.split_once(' ').unwrap_or((text, ""));
    Some((time.to_owned(), line.to_owned()))
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
    latest: String,
    /// Number of lines that were read with this timestamp. Some container runtimes give all lines
    /// of one write the same timestamp.
    num_at_latest: usize,
    /// Number of these lines that the connection has yet to repeat; `None` after a new line.
    num_to_repeat: Option<usize>,
}

impl LogCursor {
    /// Prepares for a new connection, which starts at or before `latest`.
    fn reconnect(&mut self) {
        self.num_to_repeat = Some(self.num_at_latest);
    }

    /// Advances by a line with this timestamp. Returns `true` if the line is new.
    fn advance(&mut self, time: &str) -> bool {
        if let Some(num_left) = &mut self.num_to_repeat {
            match time.cmp(self.latest.as_str()) {
                Ordering::Less => return false,
                Ordering::Equal if *num_left > 0 => {
                    *num_left -= 1;
                    return false;
                }
                Ordering::Equal | Ordering::Greater => self.num_to_repeat = None,
            }
        }
        match time.cmp(self.latest.as_str()) {
            // Standard output and standard error are logged concurrently, so a line may be late.
            Ordering::Less => {}
            Ordering::Equal => self.num_at_latest += 1,
            Ordering::Greater => (self.latest, self.num_at_latest) = (time.to_owned(), 1),
        }
        true
    }
}

/// Sends the lines of a pod until it has ended or is deleted. After a broken connection, continues
/// after the last line.
pub(super) async fn follow(cluster: Cluster, pod: Pod, tag: Tag, lines: Sender<(Tag, String)>) {
    let api: Api<Pod> = cluster.api();
    let name = pod.metadata.name.clone().unwrap_or_default();
    let uid = pod.metadata.uid.clone();
    let mut pod = pod;
    let mut cursor = LogCursor::default();
    loop {
        // Check before reading: if the pod has already ended, this pass reads the complete log.
        let was_over = is_over(&pod);
        if let Some(container) = container(&pod) {
            let since_time = cursor.latest.parse().ok();
            let params = LogParams { since_time, ..params(container, true) };
            if let Ok(stream) = api.log_stream(&name, &params).await {
                let mut reader = Box::pin(stream);
                cursor.reconnect();
                while let Some((time, line)) = next(&mut reader).await {
                    if cursor.advance(&time) && lines.send((tag, line)).await.is_err() {
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
        // Timestamps of the lines of each connection, and whether the lines are new.
        let check = |connections: &[&[(&str, bool)]]| {
            let mut cursor = LogCursor::default();
            for connection in connections {
                cursor.reconnect();
                for (time, is_new) in *connection {
                    assert_eq!(cursor.advance(time), *is_new, "{time} {connections:?}");
                }
            }
        };
        let new = |time| (time, true);
        let repeated = |time| (time, false);
        check(&[&[new("1.1"), new("1.1"), new("1.2"), new("1.2")]]);
        check(&[&[new("1.1"), new("1.2")], &[repeated("1.1"), repeated("1.2"), new("1.3")]]);
        check(&[&[new("1.1"), new("1.1")], &[repeated("1.1"), repeated("1.1"), new("1.1")]]);
        check(&[
            &[new("1.2")],
            &[repeated("1.2"), new("1.2")],
            &[repeated("1.2"), repeated("1.2")],
        ]);
        // Late lines count only on the connection that reads them first.
        check(&[&[new("1.2"), new("1.1")], &[repeated("1.2"), repeated("1.1"), new("1.3")]]);
        check(&[&[new("1.2"), new("1.1"), new("1.2")], &[repeated("1.2"), repeated("1.1")]]);
        // The server may have deleted the lines that were read.
        check(&[&[new("1.1"), new("1.1")], &[new("1.2"), new("1.2")]]);
    }

    #[tokio::test]
    async fn lines_are_split_from_their_timestamps() {
        let bytes = b"2026-11-21T19:00:00.1Z a b\n2026-11-21T19:00:01Z \n2026Z \xff\r\n2027Z x";
        let mut reader = futures::io::Cursor::new(&bytes[..]);
        let mut lines = Vec::new();
        while let Some((_, line)) = next(&mut reader).await {
            lines.push(line);
        }
        assert_eq!(lines, ["a b", "", "\u{fffd}", "x"]);
    }
}
