//! Watches that viewers share: one list and one watch per kind and scope.
//!
//! A watch needs the token of some viewer who may list and watch its scope. The API server checks
//! the permission each time a watch starts, once a minute. If it refuses, or if the viewer signs
//! out, the watch continues with the token of another permitted viewer. Without one, it ends, and
//! its objects leave memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use stoker_api::experiment::Experiment;
use stoker_api::inference::InferenceJob;
use stoker_api::trial::Trial;
use stoker_ui::{Changes, Part, Store, Visible};
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::watch::Sender;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout};

use super::account::{ClusterAccount, Rights, Scopes};
use super::lock;
use crate::ui::cluster::BATCH;
use crate::ui::objects::{Objects, Opening};
use crate::ui::watch::{Clients, Lease, watch};

/// Time without a viewer after which a watch ends.
const IDLE_MAX: Duration = Duration::from_secs(5 * 60);
/// Time between two checks for that.
const IDLE_CHECK: Duration = Duration::from_secs(20);
/// Maximum time that a page waits for the first list.
const FIRST_LIST: Duration = Duration::from_secs(5);

/// Kinds that are watched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Experiments and trials.
    Experiments,
    /// Inference jobs.
    Jobs,
}

/// A namespace, or all.
pub(super) type Scope = Option<String>;

/// Viewers whose tokens a watch may use, the latest last.
#[derive(Debug)]
struct Candidates<T>(Mutex<Vec<Weak<T>>>);

impl<T> Candidates<T> {
    fn new() -> Self {
        Self(Mutex::default())
    }

    /// Adds a viewer, or makes it the latest.
    fn offer(&self, viewer: &Arc<T>) {
        let mut all = lock(&self.0);
        all.retain(|one| one.strong_count() > 0 && one.as_ptr() != Arc::as_ptr(viewer));
        all.push(Arc::downgrade(viewer));
    }

    /// Returns the latest viewer for whom `is_permitted` holds.
    fn choose(&self, is_permitted: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let all = lock(&self.0);
        all.iter().rev().filter_map(Weak::upgrade).find(|one| is_permitted(one))
    }
}

/// A shared watch, with its objects.
#[derive(Debug)]
struct Feed {
    kind: Kind,
    scope: Scope,
    store: Arc<Store>,
    candidates: Candidates<ClusterAccount>,
    /// Viewer whose token the watch uses.
    current: Mutex<Option<Weak<ClusterAccount>>>,
    /// Whether the first list is complete or has failed, or the watch has ended.
    is_ready: Sender<bool>,
    /// Whether the store contains a complete list.
    is_complete: AtomicBool,
    used: Mutex<Instant>,
}

impl Feed {
    fn choose(&self) -> Option<Arc<ClusterAccount>> {
        self.candidates.choose(|account| account.may_watch(self.kind, &self.scope))
    }

    fn is_idle(&self) -> bool {
        lock(&self.used).elapsed() >= IDLE_MAX
    }
}

impl Clients for Feed {
    fn next(&self) -> Option<Lease> {
        let account = self.choose()?;
        *lock(&self.current) = Some(Arc::downgrade(&account));
        Some(Lease { client: account.client(), ended: Some(account.ended()) })
    }

    fn refused(&self) -> bool {
        // The viewer is asked for again after the next review of the permissions.
        if let Some(account) = lock(&self.current).take().and_then(|current| current.upgrade()) {
            account.forget_rights();
        }
        true
    }
}

/// All shared watches.
#[derive(Debug, Default)]
pub(super) struct Hub {
    feeds: Mutex<BTreeMap<(Kind, Scope), Arc<Feed>>>,
    changes: Changes,
}

impl Hub {
    /// Returns what a viewer with these permissions sees. Starts missing watches with the viewer's
    /// token, and waits for their first list.
    pub(super) async fn visible(
        self: &Arc<Self>,
        account: &Arc<ClusterAccount>,
        rights: &Rights,
    ) -> Visible {
        let (mut feeds, jobs_error) = (Vec::new(), rights.jobs_error.clone());
        let runs = self.parts(Kind::Experiments, &rights.experiments, account, &mut feeds);
        let jobs = self.parts(Kind::Jobs, &rights.jobs, account, &mut feeds);
        // A slow or refused list does not delay the page for long: it shows the rest.
        let _ = timeout(FIRST_LIST, async {
            for feed in &feeds {
                let _ = feed.is_ready.subscribe().wait_for(|is_ready| *is_ready).await;
            }
        })
        .await;
        Visible::of(runs, jobs, jobs_error, self.changes.clone())
    }

    fn parts(
        self: &Arc<Self>,
        kind: Kind,
        scopes: &Scopes,
        account: &Arc<ClusterAccount>,
        feeds: &mut Vec<Arc<Feed>>,
    ) -> Vec<Part> {
        let names = match scopes {
            Scopes::All => {
                let feed = self.join(kind, None, account);
                feeds.push(feed.clone());
                return vec![Part { store: feed.store.clone(), namespaces: None }];
            }
            Scopes::Namespaces(names) => names,
        };
        if names.is_empty() {
            return Vec::new();
        }
        // A watch of all namespaces, if there is one, contains those of this viewer.
        if let Some(all) = self.all(kind) {
            return vec![Part { store: all.store.clone(), namespaces: Some(names.clone()) }];
        }
        let part = |name: &String| {
            let feed = self.join(kind, Some(name.clone()), account);
            feeds.push(feed.clone());
            let namespaces = Some(BTreeSet::from([name.clone()]));
            Part { store: feed.store.clone(), namespaces }
        };
        names.iter().map(part).collect()
    }

    /// Returns the complete watch of all namespaces, if there is one, and counts this as a use.
    fn all(&self, kind: Kind) -> Option<Arc<Feed>> {
        let feed = lock(&self.feeds).get(&(kind, None)).cloned()?;
        *lock(&feed.used) = Instant::now();
        feed.is_complete.load(Ordering::Acquire).then_some(feed)
    }

    /// Returns a watch, and lets it use the token of a viewer.
    fn join(
        self: &Arc<Self>,
        kind: Kind,
        scope: Scope,
        account: &Arc<ClusterAccount>,
    ) -> Arc<Feed> {
        let mut feeds = lock(&self.feeds);
        if let Some(feed) = feeds.get(&(kind, scope.clone())) {
            feed.candidates.offer(account);
            *lock(&feed.used) = Instant::now();
            return feed.clone();
        }
        let store = Arc::new(Store::with_changes(self.changes.clone()));
        // Missing records may exist until the first list is complete.
        Objects::new(Opening::PerViewer).publish_failures(&store);
        let feed = Arc::new(Feed {
            kind,
            scope: scope.clone(),
            store,
            candidates: Candidates::new(),
            current: Mutex::default(),
            is_ready: Sender::new(false),
            is_complete: AtomicBool::new(false),
            used: Mutex::new(Instant::now()),
        });
        feed.candidates.offer(account);
        feeds.insert((kind, scope), feed.clone());
        tokio::spawn(run(self.clone(), feed.clone()));
        feed
    }

    /// Removes a watch, unless a viewer needs it.
    fn remove(&self, feed: &Feed) -> bool {
        let mut feeds = lock(&self.feeds);
        let is_over = feed.is_idle() || feed.choose().is_none();
        if is_over {
            feeds.remove(&(feed.kind, feed.scope.clone()));
        }
        is_over
    }
}

/// Watches until no viewer needs it, or none may.
async fn run(hub: Arc<Hub>, feed: Arc<Feed>) {
    loop {
        watch_once(&feed).await;
        if hub.remove(&feed) {
            break;
        }
    }
    feed.store.clear();
    feed.is_ready.send_replace(true);
}

async fn watch_once(feed: &Arc<Feed>) {
    let (sender, mut receiver) = unbounded_channel();
    let clients: Arc<dyn Clients> = feed.clone();
    let scope = &feed.scope;
    let mut tasks = JoinSet::new();
    match feed.kind {
        Kind::Experiments => {
            tasks.spawn(watch::<Experiment>(clients.clone(), scope.clone(), sender.clone()));
            tasks.spawn(watch::<Trial>(clients, scope.clone(), sender));
        }
        Kind::Jobs => drop(tasks.spawn(watch::<InferenceJob>(clients, scope.clone(), sender))),
    }
    let mut objects = Objects::new(Opening::PerViewer);
    let (mut changes, mut unpublished) = (Vec::new(), BTreeSet::new());
    let mut check = interval(IDLE_CHECK);
    loop {
        tokio::select! {
            num = receiver.recv_many(&mut changes, BATCH) => {
                let is_over = num == 0 || changes.iter().any(Objects::is_end);
                let changed = changes.drain(..).flat_map(|change| objects.take_in(change));
                unpublished.extend(changed);
                if is_over {
                    return;
                }
                // Until all kinds are listed, the store would lack trials that exist.
                if objects.is_complete() {
                    objects.publish(&std::mem::take(&mut unpublished), &feed.store);
                    feed.is_complete.store(true, Ordering::Release);
                    feed.is_ready.send_replace(true);
                } else if objects.has_failed() {
                    // Pages show the reason instead of waiting.
                    objects.publish_failures(&feed.store);
                    feed.is_ready.send_replace(true);
                }
            }
            _ = check.tick() => if feed.is_idle() { return },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latest_permitted_viewer_is_chosen() {
        let candidates = Candidates::new();
        let viewers = ["ada", "grace", "alan"].map(|name| Arc::new(name.to_owned()));
        for viewer in &viewers {
            candidates.offer(viewer);
        }
        let choose =
            |refused: &[&str]| candidates.choose(|name: &String| !refused.contains(&name.as_str()));
        let name = |chosen: Option<Arc<String>>| chosen.map(|name| (*name).clone());
        assert_eq!(name(choose(&[])).as_deref(), Some("alan"));
        assert_eq!(name(choose(&["alan"])).as_deref(), Some("grace"));
        assert_eq!(name(choose(&["alan", "grace", "ada"])), None);
        candidates.offer(&viewers[0]);
        assert_eq!(name(choose(&[])).as_deref(), Some("ada"));
        assert_eq!(lock(&candidates.0).len(), 3);
        // Viewers who have left are not chosen.
        let [ada, grace, alan] = viewers;
        drop((ada, alan));
        assert_eq!(name(choose(&[])).as_deref(), Some("grace"));
        drop(grace);
        assert_eq!(name(choose(&[])), None);
    }
}
