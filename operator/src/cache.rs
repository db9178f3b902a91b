//! Cached objects of the API server: one watch per kind, objects pruned on arrival, indexed by name
//! and by owner.
//!
//! The response to a write enters the cache at once, and later watch events of older versions are
//! ignored. Each plan therefore includes at least the operator's own writes.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use futures::{StreamExt as _, TryStreamExt as _, pin_mut};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};

/// Time for which deletions are remembered: longer than any response to a write takes.
const DELETIONS_KEPT: Duration = Duration::from_secs(60);

/// Namespace and name of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Namespace; empty for cluster-scoped objects.
    pub namespace: Arc<str>,
    /// Name.
    pub name: Arc<str>,
}

impl Key {
    /// Key from a namespace and a name.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// Key of a Kubernetes object.
    pub fn of<K: Resource>(object: &K) -> Self {
        let meta = object.meta();
        let text = |field: &Option<String>| Arc::from(field.as_deref().unwrap_or_default());
        Self { namespace: text(&meta.namespace), name: text(&meta.name) }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// An object that a cache can hold.
pub trait Cached: Send + Sync + 'static {
    /// Namespace and name.
    fn key(&self) -> Key;
    /// Owner in terms of this index: the trial of a pod, the experiment of a trial.
    fn group(&self) -> Option<Key>;
    /// `resourceVersion` of the object.
    fn version(&self) -> &str;
    /// Whether both are equal in all fields that matter to controllers.
    fn is_same(&self, other: &Self) -> bool;
    /// Copies times of first observations from the previous state.
    fn inherit(&mut self, _old: &Self) {}
}

/// Objects of one kind.
#[derive(Debug)]
pub struct Cache<T> {
    inner: RwLock<Inner<T>>,
    changes: mpsc::UnboundedSender<Change<T>>,
    /// Watch generation of the latest complete list; 0 before the first.
    listed: watch::Sender<u64>,
    /// Recently deleted objects, with the version at their deletion.
    deletions: Mutex<HashMap<Key, (String, Instant)>>,
}

/// An object that was added, modified or deleted.
#[derive(Debug)]
pub struct Change<T> {
    /// Previous state; `None` if the object was added.
    pub old: Option<Arc<T>>,
    /// New state; `None` if the object was deleted.
    pub new: Option<Arc<T>>,
}

#[derive(Debug)]
struct Inner<T> {
    objects: HashMap<Key, Entry<T>>,
    groups: HashMap<Key, BTreeSet<Key>>,
}

#[derive(Debug)]
struct Entry<T> {
    object: Arc<T>,
    written: Option<Instant>,
}

impl<T> Default for Inner<T> {
    fn default() -> Self {
        Self { objects: HashMap::new(), groups: HashMap::new() }
    }
}

/// Whether version `a` is older than `b`. Versions of one kind are increasing numbers.
fn is_older(a: &str, b: &str) -> bool {
    match (a.parse::<u64>(), b.parse::<u64>()) {
        (Ok(a), Ok(b)) => a < b,
        _ => false,
    }
}

impl<T: Cached> Cache<T> {
    /// Creates an empty cache and the receiver of its changes.
    pub fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Change<T>>) {
        let (changes, receiver) = mpsc::unbounded_channel();
        let cache = Self {
            inner: RwLock::default(),
            changes,
            listed: watch::Sender::new(0),
            deletions: Mutex::default(),
        };
        (Arc::new(cache), receiver)
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner<T>> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner<T>> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Object with this name.
    pub fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.read().objects.get(key).map(|entry| entry.object.clone())
    }

    /// Objects of `group`, in the order of names.
    pub fn group(&self, group: &Key) -> Vec<Arc<T>> {
        let inner = self.read();
        let keys = inner.groups.get(group).into_iter().flatten();
        let objects = keys.filter_map(|key| inner.objects.get(key));
        objects.map(|entry| entry.object.clone()).collect()
    }

    /// All objects, in no particular order.
    pub fn all(&self) -> Vec<Arc<T>> {
        self.read().objects.values().map(|entry| entry.object.clone()).collect()
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.read().objects.len()
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stores the response to a write of this operator.
    pub fn put(&self, object: T) {
        self.apply(object, Some(Instant::now()));
    }

    /// Whether a complete list has been received.
    pub fn is_ready(&self) -> bool {
        *self.listed.borrow() > 0
    }

    /// Waits until watches of this or a later generation have received a complete list.
    pub async fn wait_listed(&self, generation: u64) {
        // Ignore the error: the sender lives as long as `self`.
        let _ = self.listed.subscribe().wait_for(|listed| *listed >= generation).await;
    }

    fn apply(&self, mut object: T, written: Option<Instant>) {
        let key = object.key();
        if written.is_some() && self.was_deleted(&key, object.version()) {
            return;
        }
        let mut inner = self.write();
        let old = inner.objects.get(&key).map(|entry| entry.object.clone());
        if old.as_ref().is_some_and(|entry| is_older(object.version(), entry.version())) {
            return;
        }
        if let Some(old) = &old {
            object.inherit(old);
        }
        let object = Arc::new(object);
        let written = written.or(inner.objects.get(&key).and_then(|entry| entry.written));
        inner.insert(key, Entry { object: object.clone(), written });
        drop(inner);
        if old.as_ref().is_none_or(|old| !old.is_same(&object)) {
            self.notify(old, Some(object));
        }
    }

    /// Whether the object in a write's response was deleted since: the watch may report the
    /// deletion before the response arrives.
    fn was_deleted(&self, key: &Key, version: &str) -> bool {
        let deletions = self.deletions.lock().unwrap_or_else(PoisonError::into_inner);
        deletions.get(key).is_some_and(|(end, _)| end == version || is_older(version, end))
    }

    fn delete(&self, object: &T) {
        let key = object.key();
        let mut deletions = self.deletions.lock().unwrap_or_else(PoisonError::into_inner);
        deletions.retain(|_, (_, at)| at.elapsed() < DELETIONS_KEPT);
        deletions.insert(key.clone(), (object.version().to_owned(), Instant::now()));
        drop(deletions);
        let mut inner = self.write();
        let current = inner.objects.get(&key).map(|entry| entry.object.clone());
        // A new object with this name may have arrived before the deletion of the old one.
        let is_newer = |current: &Arc<T>| is_older(object.version(), current.version());
        let Some(old) = current.filter(|current| !is_newer(current)) else { return };
        inner.remove(&key);
        drop(inner);
        self.notify(Some(old), None);
    }

    /// Removes an object that the API server no longer has.
    pub fn forget(&self, key: &Key) {
        let mut inner = self.write();
        let old = inner.objects.get(key).map(|entry| entry.object.clone());
        inner.remove(key);
        drop(inner);
        if old.is_some() {
            self.notify(old, None);
        }
    }

    /// Applies a complete list of one namespace or of all. Removes objects that the list lacks,
    /// except those written since the list was requested at `requested_at`.
    fn replace(&self, objects: Vec<T>, namespace: Option<&str>, requested_at: Instant) {
        let listed: BTreeSet<Key> = objects.iter().map(Cached::key).collect();
        let is_kept =
            |entry: &Entry<T>| entry.written.is_some_and(|written| written >= requested_at);
        let deleted: Vec<Key> = {
            let inner = self.read();
            let is_in_scope =
                |key: &Key| namespace.is_none_or(|namespace| *key.namespace == *namespace);
            let missing = inner.objects.iter();
            let missing = missing.filter(|&(key, _)| is_in_scope(key) && !listed.contains(key));
            missing.filter(|&(_, entry)| !is_kept(entry)).map(|(key, _)| key.clone()).collect()
        };
        deleted.iter().for_each(|key| self.forget(key));
        objects.into_iter().for_each(|object| self.apply(object, None));
    }

    fn notify(&self, old: Option<Arc<T>>, new: Option<Arc<T>>) {
        // Ignore the error: a replica that shuts down has no receiver.
        let _ = self.changes.send(Change { old, new });
    }
}

impl<T: Cached> Inner<T> {
    fn insert(&mut self, key: Key, entry: Entry<T>) {
        self.remove(&key);
        if let Some(group) = entry.object.group() {
            self.groups.entry(group).or_default().insert(key.clone());
        }
        self.objects.insert(key, entry);
    }

    fn remove(&mut self, key: &Key) {
        let Some(old) = self.objects.remove(key) else { return };
        if let Some(group) = old.object.group()
            && let Some(keys) = self.groups.get_mut(&group)
        {
            keys.remove(key);
            if keys.is_empty() {
                self.groups.remove(&group);
            }
        }
    }
}

/// Fills `cache` from watches, each of one namespace or of all, for as long as this is polled. A
/// change of `refresh` restarts the watches. The cache reports the new generation once all of them
/// have received complete lists.
pub async fn watch_into<K, T>(
    apis: Vec<(Option<String>, Api<K>)>,
    config: watcher::Config,
    cache: Arc<Cache<T>>,
    read: impl Fn(K) -> Option<T> + Send + Sync,
    mut refresh: watch::Receiver<u64>,
) where
    K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + 'static,
    T: Cached,
{
    loop {
        // Generations start at 1; 0 means that no list was received.
        let generation = *refresh.borrow_and_update() + 1;
        let watches = apis.iter().enumerate().map(|(watch_idx, (_, api))| {
            let events = watcher(api.clone(), config.clone()).default_backoff();
            events.map(move |event| event.map(|event| (watch_idx, event))).boxed()
        });
        let events = futures::stream::select_all(watches);
        pin_mut!(events);
        let mut lists: Vec<List<T>> =
            apis.iter().map(|(namespace, _)| List::new(namespace.clone())).collect();
        loop {
            let event = tokio::select! {
                event = events.try_next() => event,
                changed = refresh.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
            };
            match event {
                Ok(Some((watch_idx, event))) => {
                    apply_event(&cache, &read, &mut lists[watch_idx], event);
                    if lists.iter().all(|list| list.is_done) {
                        cache.listed.send_replace(generation);
                    }
                }
                Ok(None) => break,
                Err(error) => tracing::warn!(%error, "watch failed; restarting it"),
            }
        }
    }
}

/// A list that is being received.
struct List<T> {
    namespace: Option<String>,
    objects: Vec<T>,
    requested_at: Instant,
    is_done: bool,
}

impl<T> List<T> {
    fn new(namespace: Option<String>) -> Self {
        Self { namespace, objects: vec![], requested_at: Instant::now(), is_done: false }
    }
}

fn apply_event<K, T: Cached>(
    cache: &Cache<T>,
    read: impl Fn(K) -> Option<T>,
    list: &mut List<T>,
    event: Event<K>,
) {
    match event {
        Event::Init => {
            list.objects.clear();
            list.requested_at = Instant::now();
        }
        Event::InitApply(object) => list.objects.extend(read(object)),
        Event::InitDone => {
            let objects = std::mem::take(&mut list.objects);
            cache.replace(objects, list.namespace.as_deref(), list.requested_at);
            list.is_done = true;
        }
        Event::Apply(object) => {
            if let Some(object) = read(object) {
                cache.apply(object, None);
            }
        }
        Event::Delete(object) => {
            if let Some(object) = read(object) {
                cache.delete(&object);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Thing(&'static str, &'static str, &'static str);

    impl Cached for Thing {
        fn key(&self) -> Key {
            Key::new("ns", self.0)
        }
        fn group(&self) -> Option<Key> {
            Some(Key::new("ns", self.1))
        }
        fn version(&self) -> &str {
            self.2
        }
        fn is_same(&self, other: &Self) -> bool {
            self == other
        }
    }

    fn names(cache: &Cache<Thing>, group: &str) -> String {
        let all = cache.group(&Key::new("ns", group));
        all.iter().map(|object| format!("{}@{}", object.0, object.2)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn older_versions_are_ignored() {
        let (cache, mut changes) = Cache::new();
        cache.apply(Thing("a", "g", "5"), None);
        cache.put(Thing("a", "g", "9"));
        cache.apply(Thing("a", "g", "7"), None);
        assert_eq!(names(&cache, "g"), "a@9");
        cache.delete(&Thing("a", "g", "8"));
        assert_eq!(names(&cache, "g"), "a@9");
        cache.delete(&Thing("a", "g", "10"));
        assert_eq!(names(&cache, "g"), "");
        let mut num_changes = 0;
        while changes.try_recv().is_ok() {
            num_changes += 1;
        }
        assert_eq!(num_changes, 3);
    }

    #[test]
    fn late_write_response_does_not_restore_deleted_object() {
        let (cache, _changes) = Cache::new();
        cache.apply(Thing("a", "g", "5"), None);
        cache.delete(&Thing("a", "g", "7"));
        cache.put(Thing("a", "g", "6"));
        assert_eq!(cache.len(), 0);
        cache.put(Thing("a", "g", "8"));
        assert_eq!(cache.len(), 1);
    }

    #[test]
    fn list_removes_missing_objects_except_recent_writes() {
        let (cache, _changes) = Cache::new();
        cache.apply(Thing("a", "g", "1"), None);
        cache.apply(Thing("b", "g", "2"), None);
        cache.put(Thing("e", "g", "3"));
        let requested_at = Instant::now();
        cache.put(Thing("c", "g", "9"));
        cache.replace(vec![Thing("b", "h", "3"), Thing("d", "g", "4")], None, requested_at);
        assert_eq!((names(&cache, "g"), names(&cache, "h")), ("c@9 d@4".into(), "b@3".into()));
        assert_eq!(cache.len(), 3);
        cache.replace(vec![], Some("another"), requested_at);
        assert_eq!(cache.len(), 3);
    }
}
