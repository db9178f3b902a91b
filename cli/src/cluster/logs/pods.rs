//! Logs of pods.

use std::io;
use std::pin::Pin;
use std::time::{Duration, Instant};

use futures::{AsyncBufRead, AsyncBufReadExt as _};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::api::{Api, LogParams};
use stoker_api::names::{LABEL_JOB, LABEL_TRIAL};
use tokio::sync::mpsc::Sender;

use super::cursor::{LogCursor, LogRequest};
use super::line::LogLine;
use super::tag::Tag;
use crate::cluster::connect::{self, Cluster};
use crate::cluster::request::{FailureClass, RequestError};
use crate::cluster::trial::pod_state;
use crate::failure::Failure;
use crate::print;

/// Container of the program.
const TRAINER: &str = "trainer";
/// Init container that downloads the program's files.
const SETUP: &str = "setup";
/// Longest wait for the next line of a log that is not followed.
const LINE_TIMEOUT: Duration = Duration::from_secs(60);

/// Limits for following a pod's log.
#[derive(Clone, Copy, Debug)]
pub(super) struct FollowLimits {
    /// Wait before a pod's log is requested again.
    pub(super) retry_interval: Duration,
    /// Longest time without a line. Then the log is requested again, because a silently broken
    /// connection delivers neither lines nor an end.
    pub(super) idle_max: Duration,
    /// Same as `idle_max`, for a pod that has ended and prints nothing new.
    pub(super) idle_max_ended: Duration,
    /// Longest time of failures of one class, if the API server responds.
    pub(super) refused_max: Duration,
    /// Longest time of failures, if the API server does not respond.
    pub(super) unreachable_max: Duration,
}

/// Limits for the commands.
pub(super) const FOLLOW_LIMITS: FollowLimits = FollowLimits {
    retry_interval: Duration::from_secs(1),
    idle_max: Duration::from_secs(120),
    idle_max_ended: Duration::from_secs(30),
    refused_max: Duration::from_secs(10),
    unreachable_max: Duration::from_secs(120),
};

impl FollowLimits {
    /// Returns `true` if requests that failed for this time are not repeated.
    fn are_exceeded(&self, class: FailureClass, failed_for: Duration) -> bool {
        failed_for
            >= match class {
                FailureClass::Denied | FailureClass::Refused => self.refused_max,
                FailureClass::NoResponse => self.unreachable_max,
            }
    }
}

/// Connection to a pod's log.
struct Connection {
    /// Name of the pod.
    name: String,
    reader: Pin<Box<dyn AsyncBufRead + Send>>,
}

impl Connection {
    async fn open(cluster: &Cluster, name: &str, params: &LogParams) -> Result<Self, RequestError> {
        let api: Api<Pod> = cluster.api();
        let target = format!("the log of pod `{name}`");
        let stream = cluster.try_request(&target, api.log_stream(name, params)).await?;
        Ok(Self { name: name.to_owned(), reader: Box::pin(stream) })
    }

    /// Reads the next line; `None` at the end.
    async fn next(&mut self, timeout: Duration) -> Result<Option<LogLine>, RequestError> {
        next(&mut self.reader, timeout).await.map_err(|error| {
            let why = connect::chain(&error);
            let text = format!("cannot read the complete log of pod `{}`: {why}", self.name);
            RequestError { failure: Failure::System(text), code: None }
        })
    }
}

/// Current log of a pod that has at least one line.
pub(super) struct PodLog {
    tag: Tag,
    /// Next line to show.
    line: LogLine,
    connection: Connection,
}

/// Opens the current logs of pods, and reads the first line of each.
pub(super) async fn open(
    cluster: &Cluster,
    pods: &[(Pod, Tag)],
    request: LogRequest,
) -> Result<Vec<PodLog>, Failure> {
    let mut logs = Vec::new();
    for (pod, tag) in pods {
        let name = pod.metadata.name.clone().unwrap_or_default();
        let Some(container) = container(pod) else {
            print::err(format!("pod {name} has no logs yet: it is {}", pod_state(pod)));
            continue;
        };
        let params = request.params(container, false);
        let opened = Connection::open(cluster, &name, &params).await;
        let mut connection = opened.map_err(|error| error.failure)?;
        let first = connection.next(LINE_TIMEOUT).await.map_err(|error| error.failure)?;
        logs.extend(first.map(|line| PodLog { tag: *tag, line, connection }));
    }
    Ok(logs)
}

/// Shows logs, merged by time. If a connection breaks, shows the other logs and returns the first
/// error.
pub(super) async fn show_merged(
    mut logs: Vec<PodLog>,
    mut show: impl FnMut(&Tag, &LogLine),
) -> Result<(), Failure> {
    let mut broken = None;
    // Always show the earliest pending line.
    while let Some(at) = (0..logs.len()).min_by_key(|at| logs[*at].line.printed()) {
        let log = &mut logs[at];
        show(&log.tag, &log.line);
        match log.connection.next(LINE_TIMEOUT).await {
            Ok(Some(following)) => log.line = following,
            Ok(None) => drop(logs.swap_remove(at)),
            Err(error) => {
                broken = broken.or(Some(error.failure));
                drop(logs.swap_remove(at));
            }
        }
    }
    broken.map_or(Ok(()), Err)
}

/// Reads the next line; `None` at the end. Fails if the line does not arrive in time.
async fn next<R: AsyncBufRead + Unpin>(
    reader: &mut R,
    timeout: Duration,
) -> io::Result<Option<LogLine>> {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(timeout, reader.read_until(b'\n', &mut bytes)).await;
    let len = read.unwrap_or_else(|_| {
        let text = format!("no data within {} s", timeout.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    })?;
    if len == 0 {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&bytes);
    Ok(Some(LogLine::parse(text.trim_end_matches(['\n', '\r']))))
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

/// Returns `true` if the pod's log does not exist yet.
pub(super) fn is_waiting(pod: &Pod) -> bool {
    container(pod).is_none() && !is_over(pod)
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

/// Follower of a pod's log.
pub(super) struct PodFollower {
    cluster: Cluster,
    tag: Tag,
    request: LogRequest,
    limits: FollowLimits,
    cursor: LogCursor,
    lines: Sender<(Tag, LogLine)>,
}

impl PodFollower {
    pub(super) fn new(
        cluster: &Cluster,
        tag: Tag,
        request: LogRequest,
        limits: FollowLimits,
        lines: Sender<(Tag, LogLine)>,
    ) -> Self {
        Self { cluster: cluster.clone(), tag, request, limits, cursor: LogCursor::default(), lines }
    }

    /// Sends the lines of a pod until it has ended or is deleted. After a broken connection,
    /// continues after the last line. Returns `false` if lines may be missing. Fails only if the
    /// API server denies the user access to the log.
    pub(super) async fn run(mut self, mut pod: Pod) -> Result<bool, Failure> {
        let api: Api<Pod> = self.cluster.api();
        let name = pod.metadata.name.clone().unwrap_or_default();
        let target = format!("pod `{name}`");
        let uid = pod.metadata.uid.clone();
        // Since when requests fail: in the same way, and in any way.
        let mut failed_since: Option<(FailureClass, Instant, Instant)> = None;
        let (mut has_read, mut has_reported) = (false, false);
        loop {
            // Check before reading: if the pod has already ended, this pass reads the complete log.
            let was_over = is_over(&pod);
            let read = match container(&pod) {
                Some(container) => self.read(&name, container, was_over).await,
                None => Ok(()),
            };
            match read {
                Ok(()) if was_over => return Ok(true),
                Ok(()) => (failed_since, has_read) = (None, true),
                Err(error) => {
                    // After an outage, the API server may refuse the first requests.
                    let (class, now) = (error.class(), Instant::now());
                    let (of, same, first) = failed_since.unwrap_or((class, now, now));
                    let same = if of == class { same } else { now };
                    failed_since = Some((class, same, first));
                    let is_last = self.limits.are_exceeded(class, same.elapsed());
                    if is_last && error.is_denied() {
                        return Err(error.failure);
                    }
                    if was_over && (is_last || first.elapsed() >= self.limits.unreachable_max) {
                        let remedy = remedy(&pod, self.tag.attempt);
                        print::err(format!("stoker: {}; {remedy}", error.failure));
                        return Ok(false);
                    }
                    // Checks of the target report an unreachable API server once for all pods, and
                    // a deleted pod is found below.
                    if error.code.is_some_and(|code| code != 404) && !has_reported {
                        print::err(format!("stoker: {}; retrying", error.failure));
                        has_reported = true;
                    }
                }
            }
            if self.lines.is_closed() {
                return Ok(true);
            }
            tokio::time::sleep(self.limits.retry_interval).await;
            match self.cluster.request(&target, api.get_opt(&name)).await {
                Ok(Some(current)) if current.metadata.uid == uid => {
                    if !was_over && is_over(&current) {
                        // The limits apply to the log of the ended pod from now on.
                        failed_since = None;
                    }
                    pod = current;
                }
                Ok(_) if has_read => return Ok(true),
                Ok(_) => {
                    let remedy = remedy(&pod, self.tag.attempt);
                    let text = "was deleted before its log was read";
                    print::err(format!("stoker: {target} {text}; {remedy}"));
                    return Ok(false);
                }
                // The API server is unavailable: try again.
                Err(_) => {}
            }
        }
    }

    /// Sends the lines of one connection.
    async fn read(
        &mut self,
        name: &str,
        container: &str,
        was_over: bool,
    ) -> Result<(), RequestError> {
        let params = self.cursor.request(self.request).params(container, true);
        let mut connection = Connection::open(&self.cluster, name, &params).await?;
        self.cursor.reconnect();
        let idle_max = match was_over {
            true => self.limits.idle_max_ended,
            false => self.limits.idle_max,
        };
        loop {
            match connection.next(idle_max).await {
                Ok(Some(line)) => {
                    let is_new = self.cursor.advance(&line);
                    if is_new && self.lines.send((self.tag, line)).await.is_err() {
                        return Ok(());
                    }
                }
                Ok(None) => return Ok(()),
                // The next connection continues after the last line.
                Err(_) if !was_over => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Returns how to print the stored copy of a pod's log.
fn remedy(pod: &Pod, attempt: u32) -> String {
    let labels = pod.metadata.labels.as_ref();
    let label = |name: &str| labels.and_then(|labels| labels.get(name));
    match (label(LABEL_TRIAL), label(LABEL_JOB)) {
        (Some(trial), _) => format!(
            "`stoker trial logs {trial} --attempt {attempt}` prints the stored copy when the \
             attempt has ended"
        ),
        (None, Some(job)) => format!(
            "`stoker job logs {job}` prints the stored copy when the pod is deleted or its log \
             cannot be opened"
        ),
        (None, None) => "lines are missing".to_owned(),
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

    #[tokio::test]
    async fn lines_are_split_from_their_timestamps() {
        let bytes = b"2026-11-21T19:00:00.1Z a b\n2026-11-21T21:00:01+02:00 \n\
            2026-11-21T19:00:02Z \xff\r\n2026-11-21T19:00:03Z\nrpc error: a b\n2026 x\n\n\
            2026-11-21T19:00:04Z x";
        let mut reader = futures::io::Cursor::new(&bytes[..]);
        let mut lines = Vec::new();
        while let Some(line) = next(&mut reader, LINE_TIMEOUT).await.unwrap() {
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
