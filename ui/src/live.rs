//! Live updates: one stream of server-sent events per page.
//!
//! The address of a stream contains the version that the page shows, and each change has its
//! version as ID, which browsers send when they reconnect. So a page also receives changes that
//! were made before the stream was open.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::response::sse::{Event, Sse};
use futures::stream::{self, Stream};
use serde_json::json;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use crate::job::Job;
use crate::state::num_training;
use crate::store::Run;
use crate::text;
use crate::viewer::{Refusal, Viewer};
use crate::visible::Visible;

/// Time between two heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Time between two checks for new rows of metrics. Trainers write rows every 4.5 seconds, and
/// viewers must see them within 6.
const METRICS: Duration = Duration::from_secs(1);
/// Minimum time between two changes, which a busy experiment would otherwise report for each write.
const CHANGES_MIN: Duration = Duration::from_millis(300);

/// Contents of a page. Runs and jobs have a namespace and an ID.
pub(crate) enum Shown {
    All,
    Run(String, String),
    Job(String, String),
}

/// Number of the latest change of what a page shows, and how many records and errors of their
/// sources there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version(pub(crate) u64, pub(crate) usize);

impl Version {
    /// Returns the version of a page about a job.
    pub(crate) fn of_job(job: &Job) -> Self {
        Self(job.version, 1)
    }

    /// Returns the version of a page about a run.
    pub(crate) fn of_run(run: &Run) -> Self {
        Self(run.version, 1 + usize::from(run.watch_error.is_some()))
    }

    /// Parses the text of [`Display`](fmt::Display).
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (number, records) = text.split_once('.')?;
        Some(Self(number.parse().ok()?, records.parse().ok()?))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.0, self.1)
    }
}

/// State of a stream.
struct Live {
    viewer: Arc<Viewer>,
    /// Records that the viewer may see, as last checked; `None` while permissions cannot be
    /// reviewed. They may have been withdrawn, so that the stream reports nothing.
    visible: Option<Visible>,
    of: Shown,
    changes: tokio::sync::watch::Receiver<u64>,
    heartbeat: tokio::time::Interval,
    metrics: tokio::time::Interval,
    last_version: Version,
    last_change: Instant,
    /// Whether a trial trained in this version of the run. The search costs milliseconds for
    /// 100,000 trials.
    training: (u64, bool),
}

/// Returns the version of what is shown.
fn version_of(visible: &Visible, of: &Shown) -> Version {
    let version = match of {
        Shown::All => Some(visible.version()),
        Shown::Run(namespace, id) => visible.run(namespace, id).map(|run| Version::of_run(&run)),
        Shown::Job(namespace, id) => visible.job(namespace, id).map(|job| Version::of_job(&job)),
    };
    version.unwrap_or(Version(0, 0))
}

/// Returns the events of what a page shows since `version`, or since now.
pub(crate) fn events(
    viewer: Arc<Viewer>,
    of: Shown,
    version: Option<Version>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let live = Live::new(viewer, of, version);
    Sse::new(stream::unfold(live, |mut live| async move {
        // The stream ends with the session.
        let event = live.next().await?;
        Some((Ok(event), live))
    }))
}

impl Live {
    fn new(viewer: Arc<Viewer>, of: Shown, version: Option<Version>) -> Self {
        let visible = viewer.visible.clone();
        let mut live = Self {
            changes: visible.changes(),
            heartbeat: interval(HEARTBEAT),
            metrics: interval(METRICS),
            last_version: version.unwrap_or_else(|| version_of(&visible, &of)),
            last_change: Instant::now(),
            training: (0, false),
            visible: Some(visible),
            viewer,
            of,
        };
        live.heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        live.metrics.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Compare the versions once, without waiting for a change.
        live.changes.mark_changed();
        live
    }

    /// Returns whether a trial may write metrics.
    fn is_training(&mut self) -> bool {
        let Shown::Run(namespace, id) = &self.of else { return false };
        let run = self.visible.as_ref().and_then(|visible| visible.run(namespace, id));
        let Some(run) = run else { return false };
        if self.training.0 != run.version {
            self.training = (run.version, num_training(&run) > 0);
        }
        self.training.1
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::select! {
                _ = self.heartbeat.tick() => {
                    match self.viewer.visible_now().await {
                        Ok(visible) => self.visible = Some(visible),
                        Err(Refusal::Token(_)) => return None,
                        // Without heartbeats, the page reports that it is not up to date.
                        Err(Refusal::Unavailable(_)) => {
                            self.visible = None;
                            continue;
                        }
                    }
                    // Permissions may have changed too, and changes during an outage count.
                    self.changes.mark_changed();
                    let data = json!({ "time": text::now().0 }).to_string();
                    return Some(Event::default().event("heartbeat").data(data));
                }
                _ = self.metrics.tick() => {
                    if self.is_training() {
                        let data = json!({ "version": text::now().0 }).to_string();
                        return Some(Event::default().event("metrics").data(data));
                    }
                }
                changed = self.changes.changed() => {
                    if changed.is_err() {
                        // The server ends: the browser reconnects to the next one.
                        std::future::pending::<()>().await;
                    }
                    sleep_until(self.last_change + CHANGES_MIN).await;
                    self.changes.borrow_and_update();
                    let Some(visible) = &self.visible else { continue };
                    let version = version_of(visible, &self.of);
                    if version != self.last_version {
                        self.last_version = version;
                        self.last_change = Instant::now();
                        let data = json!({ "version": version.0 }).to_string();
                        let event = Event::default().event("change").id(version.to_string());
                        return Some(event.data(data));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use tokio::time::timeout;

    use super::*;
    use crate::fixture::{self, FakeDirectory};
    use crate::sessions::{Offer, Sessions, SignIn};
    use crate::site::Site;
    use crate::store::Store;
    use crate::viewer::Token;

    #[tokio::test]
    async fn metrics_are_announced_while_a_trial_trains() {
        let store = Arc::new(Store::default());
        let viewer = Viewer {
            visible: Visible::all(store.clone()),
            site: Site::default(),
            metrics: Arc::default(),
            session: None,
        };
        let id = fixture::run(json!({}), json!({}), &[]).id();
        let mut live = Live::new(Arc::new(viewer), Shown::Run("ml".to_owned(), id), None);
        let mut check = |phase: &str, attempts: serde_json::Value, expected: bool| {
            let trials = [json!({}), json!({ "phase": "Running", "attempts": attempts })];
            store.replace(fixture::run(json!({}), json!({ "phase": phase }), &trials));
            assert_eq!(live.is_training(), expected, "{phase} {attempts}");
        };
        check("Running", json!([]), false);
        check("Running", json!([{"number": 0}]), true);
        check("Running", json!([{"number": 0, "end": "Preempted"}]), false);
        check("Paused", json!([{"number": 0, "end": "Preempted"}, {"number": 1}]), true);
        check("Completed", json!([{"number": 0}]), false);
    }

    #[tokio::test(start_paused = true)]
    async fn outages_silence_a_stream_until_permissions_are_known() {
        let directory = Arc::new(FakeDirectory::default());
        directory.namespaces.lock().unwrap().push("ml".to_owned());
        let offer = Offer {
            directory: directory.clone(),
            sign_in: SignIn::Form,
            hosts: Vec::new(),
            allows_actions: false,
        };
        let sessions = Sessions::new(offer);
        let session = sessions.start_as(Token::new("ada").unwrap(), "secret").await.unwrap();
        let sight = session.account.sight().await.unwrap();
        let viewer = Viewer {
            visible: sight.visible.clone(),
            site: Site::default(),
            metrics: Arc::default(),
            session: Some((session.clone(), sight)),
        };
        let mut live = Live::new(Arc::new(viewer), Shown::All, None);
        let limit = 4 * HEARTBEAT;
        assert!(timeout(limit, live.next()).await.unwrap().is_some());
        let set_unavailable = |is| directory.is_unavailable.store(is, Ordering::Release);
        set_unavailable(true);
        assert!(timeout(limit, live.next()).await.is_err());
        // The viewer may not see this change: permissions may have been withdrawn.
        directory.store.replace(fixture::run(json!({}), json!({}), &[]));
        assert!(timeout(limit, live.next()).await.is_err());
        set_unavailable(false);
        // A heartbeat, then the change.
        let before = live.last_version;
        assert!(timeout(limit, live.next()).await.unwrap().is_some());
        assert!(timeout(limit, live.next()).await.unwrap().is_some());
        assert_ne!(live.last_version, before);
        session.end();
        assert!(timeout(limit, async { while live.next().await.is_some() {} }).await.is_ok());
    }
}
