//! What the API server holds, as far as it matters here: one watch for each kind, pruned as it comes
//! in, and found by name or by what it belongs to.
//!
//! A write's answer is put into the cache at once, and what a watch says later of an older version is
//! passed over: whoever plans again sees at least what was written before.

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

/// How long an object's end is remembered: longer than the answer to a write takes.
const END_KEPT: Duration = Duration::from_secs(60);

/// An object's namespace and name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Its namespace; empty for what has none.
    pub namespace: Arc<str>,
    /// Its name.
    pub name: Arc<str>,
}

impl Key {
    /// The key of an object.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// The key of an object of the API server's.
    pub fn of<K: Resource>(object: &K) -> Self {
        let meta = object.meta();
        let text = |it: &Option<String>| Arc::from(it.as_deref().unwrap_or_default());
        Self { namespace: text(&meta.namespace), name: text(&meta.name) }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// What a cache holds.
pub trait Cached: Send + Sync + 'static {
    /// Its namespace and name.
    fn key(&self) -> Key;
    /// What it belongs to: a pod to its trial, a trial to its experiment.
    fn group(&self) -> Option<Key>;
    /// Its version.
    fn version(&self) -> &str;
    /// Whether nothing that matters differs.
    fn is_same(&self, other: &Self) -> bool;
}

/// The objects of one kind.
#[derive(Debug)]
pub struct Cache<T> {
    inner: RwLock<Inner<T>>,
    changes: mpsc::UnboundedSender<Change<T>>,
    /// The generation of watches that the latest whole list is of; 0 before the first.
    listed: watch::Sender<u64>,
    /// What was deleted lately, with the version of its end.
    ends: Mutex<HashMap<Key, (String, Instant)>>,
}

/// An object that came, changed or went.
#[derive(Debug)]
pub struct Change<T> {
    /// What it was.
    pub old: Option<Arc<T>>,
    /// What it is.
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

/// Whether version `a` is older than `b`. Versions of one kind are numbers that grow.
fn is_older(a: &str, b: &str) -> bool {
    match (a.parse::<u64>(), b.parse::<u64>()) {
        (Ok(a), Ok(b)) => a < b,
        _ => false,
    }
}

impl<T: Cached> Cache<T> {
    /// An empty cache, and what changes in it.
    pub fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Change<T>>) {
        let (changes, receiver) = mpsc::unbounded_channel();
        let cache = Self {
            inner: RwLock::default(),
            changes,
            listed: watch::Sender::new(0),
            ends: Mutex::default(),
        };
        (Arc::new(cache), receiver)
    }

    fn read(&self) -> RwLockReadGuard<'_, Inner<T>> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Inner<T>> {
        self.inner.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The object of a name.
    pub fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.read().objects.get(key).map(|it| it.object.clone())
    }

    /// What belongs to `group`, by name.
    pub fn group(&self, group: &Key) -> Vec<Arc<T>> {
        let inner = self.read();
        let keys = inner.groups.get(group).into_iter().flatten();
        keys.filter_map(|it| inner.objects.get(it)).map(|it| it.object.clone()).collect()
    }

    /// All objects, in no order.
    pub fn all(&self) -> Vec<Arc<T>> {
        self.read().objects.values().map(|it| it.object.clone()).collect()
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.read().objects.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes in the answer to a write of ours.
    pub fn put(&self, object: T) {
        self.apply(object, Some(Instant::now()));
    }

    /// Whether a whole list has been taken in.
    pub fn is_ready(&self) -> bool {
        *self.listed.borrow() > 0
    }

    /// Waits until a whole list has been taken in by watches of this generation or a later one.
    pub async fn ready(&self, generation: u64) {
        // The sender lives as long as this does.
        let _ = self.listed.subscribe().wait_for(|it| *it >= generation).await;
    }

    fn apply(&self, object: T, written: Option<Instant>) {
        let key = object.key();
        if written.is_some() && self.has_ended(&key, object.version()) {
            return;
        }
        let object = Arc::new(object);
        let mut inner = self.write();
        let old = inner.objects.get(&key).map(|it| it.object.clone());
        if old.as_ref().is_some_and(|it| is_older(object.version(), it.version())) {
            return;
        }
        let written = written.or(inner.objects.get(&key).and_then(|it| it.written));
        inner.insert(key, Entry { object: object.clone(), written });
        drop(inner);
        if old.as_ref().is_none_or(|it| !it.is_same(&object)) {
            self.tell(old, Some(object));
        }
    }

    /// Whether an object of this version, the answer to a write, is gone since: the end of it may be
    /// heard of before the answer.
    fn has_ended(&self, key: &Key, version: &str) -> bool {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.get(key).is_some_and(|it| it.0 == version || is_older(version, &it.0))
    }

    fn delete(&self, object: &T) {
        let key = object.key();
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.retain(|_, it| it.1.elapsed() < END_KEPT);
        ends.insert(key.clone(), (object.version().to_owned(), Instant::now()));
        drop(ends);
        let mut inner = self.write();
        let current = inner.objects.get(&key).map(|it| it.object.clone());
        // A new object of the name may have come before the old one's end.
        let is_newer = |it: &Arc<T>| is_older(object.version(), it.version());
        let Some(old) = current.filter(|it| !is_newer(it)) else { return };
        inner.remove(&key);
        drop(inner);
        self.tell(Some(old), None);
    }

    /// Takes an object out that the API server does not have any more.
    pub fn forget(&self, key: &Key) {
        let mut inner = self.write();
        let old = inner.objects.get(key).map(|it| it.object.clone());
        inner.remove(key);
        drop(inner);
        if old.is_some() {
            self.tell(old, None);
        }
    }

    /// Takes in a whole list of a namespace, or of all: what is not in it is gone, but for what was
    /// written since the list was asked for.
    fn replace(&self, objects: Vec<T>, namespace: Option<&str>, asked: Instant) {
        let found: BTreeSet<Key> = objects.iter().map(Cached::key).collect();
        let is_kept = |it: &Entry<T>| it.written.is_some_and(|it| it >= asked);
        let gone: Vec<Key> = {
            let inner = self.read();
            let is_listed =
                |it: &Key| namespace.is_none_or(|namespace| *it.namespace == *namespace);
            let gone = inner.objects.iter().filter(|it| is_listed(it.0) && !found.contains(it.0));
            gone.filter(|it| !is_kept(it.1)).map(|it| it.0.clone()).collect()
        };
        gone.iter().for_each(|it| self.forget(it));
        objects.into_iter().for_each(|it| self.apply(it, None));
    }

    fn tell(&self, old: Option<Arc<T>>, new: Option<Arc<T>>) {
        // Nobody listens in a replica that ends.
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

/// Fills `cache` from watches, each of a namespace or of all, for as long as this is polled. They begin
/// anew, with whole lists, whenever `refresh` says so; until those are there the cache is not ready.
pub async fn feed<K, T>(
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
        // Generations count from 1: 0 is that of no list.
        let generation = *refresh.borrow_and_update() + 1;
        let watches = apis.iter().enumerate().map(|(place, (_, api))| {
            let events = watcher(api.clone(), config.clone()).default_backoff();
            events.map(move |it| it.map(|it| (place, it))).boxed()
        });
        let events = futures::stream::select_all(watches);
        pin_mut!(events);
        let mut lists: Vec<List<T>> = apis.iter().map(|it| List::new(it.0.clone())).collect();
        loop {
            let event = tokio::select! {
                event = events.try_next() => event,
                changed = refresh.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
            };
            match event {
                Ok(Some((place, event))) => {
                    take(&cache, &read, &mut lists[place], event);
                    if lists.iter().all(|it| it.is_done) {
                        cache.listed.send_replace(generation);
                    }
                }
                Ok(None) => break,
                Err(error) => tracing::warn!(%error, "a watch was cut and is begun again"),
            }
        }
    }
}

/// A list that comes in.
struct List<T> {
    namespace: Option<String>,
    objects: Vec<T>,
    asked: Instant,
    is_done: bool,
}

impl<T> List<T> {
    fn new(namespace: Option<String>) -> Self {
        Self { namespace, objects: vec![], asked: Instant::now(), is_done: false }
    }
}

fn take<K, T: Cached>(
    cache: &Cache<T>,
    read: impl Fn(K) -> Option<T>,
    list: &mut List<T>,
    event: Event<K>,
) {
    match event {
        Event::Init => {
            list.objects.clear();
            list.asked = Instant::now();
        }
        Event::InitApply(object) => list.objects.extend(read(object)),
        Event::InitDone => {
            let objects = std::mem::take(&mut list.objects);
            cache.replace(objects, list.namespace.as_deref(), list.asked);
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
        all.iter().map(|it| format!("{}@{}", it.0, it.2)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn an_older_version_changes_nothing() {
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
    fn the_answer_to_a_write_that_comes_after_the_end_brings_nothing_back() {
        let (cache, _changes) = Cache::new();
        cache.apply(Thing("a", "g", "5"), None);
        cache.delete(&Thing("a", "g", "7"));
        cache.put(Thing("a", "g", "6"));
        assert_eq!(cache.len(), 0);
        cache.put(Thing("a", "g", "8"));
        assert_eq!(cache.len(), 1);
    }

    #[test]
    fn a_list_takes_away_what_it_lacks_but_for_what_was_just_written() {
        let (cache, _changes) = Cache::new();
        cache.apply(Thing("a", "g", "1"), None);
        cache.apply(Thing("b", "g", "2"), None);
        cache.put(Thing("e", "g", "3"));
        let asked = Instant::now();
        cache.put(Thing("c", "g", "9"));
        cache.replace(vec![Thing("b", "h", "3"), Thing("d", "g", "4")], None, asked);
        assert_eq!((names(&cache, "g"), names(&cache, "h")), ("c@9 d@4".into(), "b@3".into()));
        assert_eq!(cache.len(), 3);
        cache.replace(vec![], Some("another"), asked);
        assert_eq!(cache.len(), 3);
    }
}
