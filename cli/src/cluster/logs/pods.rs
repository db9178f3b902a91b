//! The lines of pods.

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

/// The container that runs the program.
const TRAINER: &str = "trainer";
/// The container that brings its files.
const SETUP: &str = "setup";
/// How long to wait before a pod's log is asked for again.
const AGAIN: Duration = Duration::from_secs(1);

/// A line, and when it was printed as Kubernetes writes it: such times sort as text.
type Stamped = (String, String);

/// Shows what pods have printed so far, in the order of its time.
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
            print::err(format!("pod {name} has printed nothing yet: it is {}", pod_state(pod)));
            continue;
        };
        let params = params(container, false);
        let asked = format!("the log of pod `{name}`");
        let stream = cluster.ask(&asked, api.log_stream(&name, &params)).await?;
        let mut reader = Box::pin(stream);
        if let Some(first) = next(&mut reader).await {
            open.push((first, reader, tag));
        }
    }
    // The earliest line of all pods goes first.
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

/// The next line; none at the end, or where the connection was cut.
async fn next<R: AsyncBufRead + Unpin>(reader: &mut R) -> Option<Stamped> {
    let mut bytes = Vec::new();
    reader.read_until(b'\n', &mut bytes).await.ok().filter(|len| *len > 0)?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_end_matches(['\n', '\r']);
    let (time, line) = text.split_once(' ').unwrap_or((text, ""));
    Some((time.to_owned(), line.to_owned()))
}

/// The container whose log tells most: the program's, or the one before it if that failed.
fn container(pod: &Pod) -> Option<&'static str> {
    let status = pod.status.as_ref()?;
    let find = |of: &Option<Vec<ContainerStatus>>, name: &str| {
        of.iter().flatten().find(|it| it.name == name).and_then(|it| it.state.clone())
    };
    let has_started = find(&status.container_statuses, TRAINER)
        .is_some_and(|it| it.running.is_some() || it.terminated.is_some());
    let setup = find(&status.init_container_statuses, SETUP).and_then(|it| it.terminated);
    match (setup, has_started) {
        (Some(setup), _) if setup.exit_code != 0 => Some(SETUP),
        (_, true) => Some(TRAINER),
        _ => None,
    }
}

/// Whether nothing more comes from the pod.
fn is_over(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let has_ended = |it: &ContainerStatus| {
        it.name == TRAINER && it.state.as_ref().is_some_and(|it| it.terminated.is_some())
    };
    status.and_then(|it| it.phase.as_deref()).is_some_and(|it| it == "Succeeded" || it == "Failed")
        || status.is_some_and(|it| it.container_statuses.iter().flatten().any(has_ended))
}

/// Sends the lines of a pod as they come, until it is over or gone. Where the connection is cut,
/// another goes on after the last line.
pub(super) async fn follow(cluster: Cluster, pod: Pod, tag: Tag, lines: Sender<(Tag, String)>) {
    let api: Api<Pod> = cluster.api();
    let name = pod.metadata.name.clone().unwrap_or_default();
    let uid = pod.metadata.uid.clone();
    let mut pod = pod;
    let mut last = String::new();
    loop {
        // Asked before the log is read: what it printed before its end is then read whole.
        let was_over = is_over(&pod);
        if let Some(container) = container(&pod) {
            // Seconds are as fine as this goes: what was read before is passed over.
            let params = LogParams { since_time: last.parse().ok(), ..params(container, true) };
            if let Ok(stream) = api.log_stream(&name, &params).await {
                let mut reader = Box::pin(stream);
                while let Some((time, line)) = next(&mut reader).await {
                    if time <= last {
                        continue;
                    }
                    last = time;
                    if lines.send((tag, line)).await.is_err() {
                        return;
                    }
                }
            }
        }
        if was_over {
            return;
        }
        tokio::time::sleep(AGAIN).await;
        match api.get_opt(&name).await {
            Ok(Some(found)) if found.metadata.uid == uid => pod = found,
            Ok(_) => return,
            // The API server is away: what is followed is still there when it is back.
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
    fn the_log_is_that_of_the_program_or_of_the_setup_that_failed() {
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
    async fn lines_are_read_with_their_times_whatever_their_bytes() {
        let bytes = b"2026-11-21T19:00:00.1Z a b\n2026-11-21T19:00:01Z \n2026Z \xff\r\n2027Z x";
        let mut reader = futures::io::Cursor::new(&bytes[..]);
        let mut found = Vec::new();
        while let Some((_, line)) = next(&mut reader).await {
            found.push(line);
        }
        assert_eq!(found, ["a b", "", "\u{fffd}", "x"]);
    }
}
