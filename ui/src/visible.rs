//! Records that one viewer may see.
//!
//! Pages read experiments and jobs only through [`Visible`]. It is the only way from a request to
//! the stores, so that a new page cannot show a namespace that the viewer may not list.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;

use crate::job::Job;
use crate::live::Version;
use crate::store::{Changes, Run, Store, Unreadable};

/// Namespaces of a store that the viewer may see.
#[derive(Clone, Debug)]
pub struct Part {
    /// Records of one or all namespaces.
    pub store: Arc<Store>,
    /// Shown namespaces; `None` for all of the store.
    pub namespaces: Option<BTreeSet<String>>,
}

impl Part {
    fn shows(&self, namespace: &str) -> bool {
        self.namespaces.as_ref().is_none_or(|shown| shown.contains(namespace))
    }
}

/// Experiments and jobs that one viewer may see now.
#[derive(Clone, Debug)]
pub struct Visible {
    /// Parts with experiments and trials. No namespace is in two of them.
    runs: Vec<Part>,
    /// Parts with jobs. No namespace is in two of them.
    jobs: Vec<Part>,
    /// Why jobs of some namespaces are missing.
    jobs_error: Option<String>,
    changes: Changes,
}

impl Visible {
    /// Creates the view of a viewer who may see everything in a store.
    pub fn all(store: Arc<Store>) -> Self {
        let changes = store.changes();
        let parts = vec![Part { store, namespaces: None }];
        Self { runs: parts.clone(), jobs: parts, jobs_error: None, changes }
    }

    /// Creates a view of parts. All their stores have the counter `changes`.
    pub fn of(
        runs: Vec<Part>,
        jobs: Vec<Part>,
        jobs_error: Option<String>,
        changes: Changes,
    ) -> Self {
        Self { runs, jobs, jobs_error, changes }
    }

    /// Returns all shown runs, by namespace and ID.
    pub fn runs(&self) -> Vec<Arc<Run>> {
        let parts = self.runs.iter();
        let mut runs: Vec<Arc<Run>> =
            parts.flat_map(|part| part.store.runs(|namespace| part.shows(namespace))).collect();
        if self.runs.len() > 1 {
            runs.sort_by_key(|run| (run.namespace.clone(), run.id()));
        }
        runs
    }

    /// Returns the shown run with this ID, or the newest with this name. Its storage is that of the
    /// store: see [`Viewer::run`](crate::viewer::Viewer::run).
    pub(crate) fn run(&self, namespace: &str, name: &str) -> Option<Arc<Run>> {
        let mut parts = self.runs.iter().filter(|part| part.shows(namespace));
        parts.find_map(|part| {
            let run = part.store.run(namespace, name)?;
            Some(match part.store.watch_error() {
                None => run,
                Some(why) => Arc::new(run.with_watch_error(why)),
            })
        })
    }

    /// Returns all shown jobs, by namespace and ID.
    pub(crate) fn jobs(&self) -> Vec<Arc<Job>> {
        let parts = self.jobs.iter();
        let mut jobs: Vec<Arc<Job>> =
            parts.flat_map(|part| part.store.jobs(|namespace| part.shows(namespace))).collect();
        if self.jobs.len() > 1 {
            jobs.sort_by_key(|job| (job.namespace.clone(), job.id()));
        }
        jobs
    }

    /// Returns the shown job with this ID, or the newest with this name. Its output is that of the
    /// store: see [`Viewer::job`](crate::viewer::Viewer::job).
    pub(crate) fn job(&self, namespace: &str, name: &str) -> Option<Arc<Job>> {
        let mut parts = self.jobs.iter().filter(|part| part.shows(namespace));
        parts.find_map(|part| part.store.job(namespace, name))
    }

    /// Returns why some experiments and trials may be missing or out of date.
    pub fn watch_error(&self) -> Option<String> {
        self.runs.iter().find_map(|part| part.store.watch_error()).map(|(_, why)| why)
    }

    /// Returns why experiments and trials of a namespace may be missing or out of date.
    pub(crate) fn watch_error_in(&self, namespace: &str) -> Option<String> {
        let mut parts = self.runs.iter().filter(|part| part.shows(namespace));
        parts.find_map(|part| part.store.watch_error()).map(|(_, why)| why)
    }

    /// Returns why jobs of a shown namespace cannot be read.
    pub(crate) fn jobs_error_in(&self, namespace: &str) -> Option<String> {
        let mut parts = self.jobs.iter().filter(|part| part.shows(namespace));
        parts.find_map(|part| part.store.jobs_error()).map(|(_, why)| why)
    }

    /// Returns why some jobs cannot be shown.
    pub fn jobs_error(&self) -> Option<String> {
        let of_stores = || self.jobs.iter().find_map(|part| part.store.jobs_error());
        self.jobs_error.clone().or_else(|| of_stores().map(|(_, why)| why))
    }

    /// Returns the shown records that cannot be read.
    pub fn unreadable(&self) -> Unreadable {
        let all = self.runs.iter().chain(&self.jobs);
        all.flat_map(|part| {
            let mut unreadable = part.store.unreadable();
            unreadable.retain(|(namespace, _), _| part.shows(namespace));
            unreadable
        })
        .collect()
    }

    /// Returns a number that differs after each change of what is shown: that of the latest change,
    /// and how many records and errors there are.
    pub(crate) fn version(&self) -> Version {
        let (runs, jobs) = (self.runs(), self.jobs());
        let versions = runs.iter().map(|run| run.version).chain(jobs.iter().map(|job| job.version));
        let of_runs = self.runs.iter().filter_map(|part| part.store.watch_error());
        let of_jobs = self.jobs.iter().filter_map(|part| part.store.jobs_error());
        let versions = versions.chain(of_runs.chain(of_jobs).map(|(change, _)| change));
        let num_records = runs.len() + jobs.len() + self.unreadable().len();
        let errors = [self.watch_error(), self.jobs_error()];
        let num_errors = errors.iter().flatten().count();
        Version(versions.max().unwrap_or(0), num_records + num_errors)
    }

    /// Returns a receiver that wakes after changes, also of records that are not shown.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture;

    fn part(store: &Arc<Store>, namespaces: &[&str]) -> Part {
        let namespaces = namespaces.iter().map(|name| (*name).to_owned()).collect();
        Part { store: store.clone(), namespaces: Some(namespaces) }
    }

    fn names(view: &Visible) -> Vec<String> {
        let runs = view.runs();
        let jobs = view.jobs();
        let all = runs.iter().map(|run| format!("{}/{}", run.namespace, run.name));
        all.chain(jobs.iter().map(|job| format!("{}/{}", job.namespace, job.name))).collect()
    }

    #[test]
    fn view_shows_only_its_namespaces() {
        let changes = Changes::default();
        let store = Arc::new(Store::with_changes(changes.clone()));
        for namespace in ["ml", "vision"] {
            let mut run = fixture::run(json!({}), json!({}), &[]);
            run.namespace = namespace.to_owned();
            store.replace(run);
            let mut job = fixture::job(json!({}), true);
            job.namespace = namespace.to_owned();
            store.replace_job(job);
        }
        let key = |namespace: &str| (namespace.to_owned(), "broken".to_owned());
        store.set_unreadable(["ml", "vision"].map(|of| (key(of), "why".to_owned())).into());
        let view = |runs: &[&str], jobs: &[&str]| {
            let (runs, jobs) = (part(&store, runs), part(&store, jobs));
            Visible::of(vec![runs], vec![jobs], None, changes.clone())
        };
        let both = view(&["ml"], &["ml"]);
        assert_eq!(names(&both), ["ml/iris", "ml/species"]);
        assert!(both.run("ml", "iris").is_some() && both.run("vision", "iris").is_none());
        assert!(both.job("ml", "species").is_some() && both.job("vision", "species").is_none());
        assert_eq!(both.unreadable().into_keys().collect::<Vec<_>>(), [key("ml")]);
        assert_eq!(names(&view(&["vision"], &[])), ["vision/iris"]);
        assert_eq!(names(&view(&[], &["ml"])), ["ml/species"]);
        assert_eq!(names(&Visible::all(store.clone())).len(), 4);
        // Changes elsewhere are not seen.
        let before = both.version();
        let mut hidden = fixture::run(json!({}), json!({}), &[]);
        hidden.namespace = "vision".to_owned();
        store.replace(hidden);
        assert_eq!(both.version(), before);
        store.retain_jobs(|_| false);
        assert_ne!(both.version(), before);
    }

    #[test]
    fn missing_records_have_the_error_of_their_namespace() {
        let stores = [Arc::new(Store::default()), Arc::new(Store::default())];
        let parts = || vec![part(&stores[0], &["ml"]), part(&stores[1], &["vision"])];
        let view = Visible::of(parts(), parts(), None, Changes::default());
        stores[0].set_watch_error(Some("not listed".to_owned()));
        stores[1].set_jobs_error(Some("no answer".to_owned()));
        let check = |namespace: &str, expected: [Option<&str>; 2]| {
            let (watch, jobs) = (view.watch_error_in(namespace), view.jobs_error_in(namespace));
            assert_eq!([watch.as_deref(), jobs.as_deref()], expected, "{namespace}");
        };
        check("ml", [Some("not listed"), None]);
        check("vision", [None, Some("no answer")]);
        check("other", [None, None]);
    }

    #[test]
    fn errors_of_watches_change_the_list_and_pages() {
        let store = Arc::new(Store::default());
        store.replace(fixture::run(json!({}), json!({}), &[]));
        let view = Visible::all(store.clone());
        let state = || {
            let run = view.run("ml", "iris").unwrap();
            (view.version(), Version::of_run(&run), run.watch_error.clone())
        };
        let changes = view.changes();
        let before = state();
        store.set_watch_error(Some("no answer".to_owned()));
        assert!(changes.has_changed().unwrap());
        let failed = state();
        assert!(failed.0 != before.0 && failed.1 != before.1);
        assert_eq!((failed.2.as_deref(), before.2.as_deref()), (Some("no answer"), None));
        store.set_watch_error(Some("forbidden".to_owned()));
        let refused = state();
        assert!(refused.0 != failed.0 && refused.1 != failed.1);
        store.set_watch_error(None);
        assert_eq!(state(), before);
    }
}
