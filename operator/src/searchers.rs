//! Questions to external searchers, outside of reconciles: a service may take seconds to answer.
//!
//! ```text
//!   reconcile -> poll: question -> ask_all -> answer, experiment is queued -> reconcile -> poll
//! ```
//!
//! Each experiment has at most one question on its way. The operator reaches only Services of the
//! experiment's namespace. It connects to their cluster IP, or to `SERVICE.NAMESPACE.svc` if they
//! are headless.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use kube::{Api, Client};
use stoker_api::external::{Answer, Question, SearcherHost, SearcherUrl};
use stoker_engine::experiment::{Asked, Refusal};
use stoker_searcher::AskError;
use tokio::sync::Notify;
use tokio::task::{self, JoinSet};
use tokio::time::Instant;

use crate::cache::Key;
use crate::context::Context;

/// Maximum number of questions on their way, of all experiments.
const QUESTIONS_MAX: usize = 64;
/// Maximum number of questions on their way, of the experiments of one namespace. A service that
/// does not answer occupies a question for 30 s.
const NAMESPACE_QUESTIONS_MAX: usize = 16;

/// Questions by experiment.
#[derive(Debug, Default)]
pub struct Searchers {
    slots: Mutex<HashMap<Key, Slot>>,
    /// Number of questions so far, which orders them.
    num_questions: AtomicU64,
    changed: Notify,
}

/// The question of an experiment.
#[derive(Debug)]
struct Slot {
    uid: String,
    /// Position in the order in which questions are asked.
    turn: u64,
    asked: Asked,
    num_failures: u32,
    /// Why the question, or the one before it, has no answer yet.
    refusal: Option<Refusal>,
    state: SlotState,
}

#[derive(Debug)]
enum SlotState {
    Queued(Box<Request>),
    Asking,
    Answered(Answer),
    Failed {
        retry_at: Instant,
    },
    /// The answer was taken.
    Idle,
}

/// A question and its address.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) url: String,
    pub(crate) namespace: String,
    pub(crate) question: Question,
}

/// State of a question.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Progress {
    /// The experiment is queued when the answer arrives. With the reason if asking has failed.
    Asking(Option<Refusal>),
    /// The answer, which is returned once.
    Answered(Asked, Answer),
    /// The question is repeated after this delay.
    Failed(Refusal, Duration),
}

impl Searchers {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how far a question is. Asks it if it was not asked.
    pub(crate) fn poll(
        &self,
        key: &Key,
        uid: &str,
        asked: Asked,
        request: impl FnOnce() -> Request,
    ) -> Progress {
        let mut slots = self.lock();
        let slot = slots.get_mut(key).filter(|slot| slot.uid == uid);
        let (num_failures, refusal) = match slot {
            Some(slot) => {
                let is_same = slot.asked.call == asked.call;
                match std::mem::replace(&mut slot.state, SlotState::Idle) {
                    SlotState::Answered(answer) if is_same => {
                        return Progress::Answered(slot.asked, answer);
                    }
                    SlotState::Failed { retry_at } if is_same && retry_at > Instant::now() => {
                        slot.state = SlotState::Failed { retry_at };
                        if let Some(refusal) = slot.refusal.clone() {
                            let wait = retry_at.duration_since(Instant::now());
                            return Progress::Failed(refusal, wait);
                        }
                    }
                    // A question on its way is not asked again, even if it is not due any more.
                    state @ (SlotState::Queued(_) | SlotState::Asking) => {
                        slot.state = state;
                        return Progress::Asking(slot.refusal.clone());
                    }
                    SlotState::Answered(_) | SlotState::Failed { .. } | SlotState::Idle => {}
                }
                (slot.num_failures, slot.refusal.clone())
            }
            None => (0, None),
        };
        let state = SlotState::Queued(Box::new(request()));
        let turn = self.num_questions.fetch_add(1, Ordering::Relaxed);
        let slot = Slot { uid: uid.to_owned(), turn, asked, num_failures, refusal, state };
        let progress = Progress::Asking(slot.refusal.clone());
        slots.insert(key.clone(), slot);
        drop(slots);
        self.changed.notify_one();
        progress
    }

    /// Records that the answer was accepted.
    pub(crate) fn accept(&self, key: &Key) {
        if let Some(slot) = self.lock().get_mut(key) {
            (slot.num_failures, slot.refusal) = (0, None);
        }
    }

    /// Records that there is no usable answer. Returns the refusal and the delay of the next try.
    pub(crate) fn refuse(&self, key: &Key, error: &AskError) -> (Refusal, Duration) {
        let refusal = Refusal { reason: error.reason().to_owned(), message: error.to_string() };
        let mut slots = self.lock();
        let num_failures = slots.get(key).map_or(0, |slot| slot.num_failures) + 1;
        let wait = stoker_searcher::back_off(num_failures);
        if let Some(slot) = slots.get_mut(key) {
            slot.num_failures = num_failures;
            slot.refusal = Some(refusal.clone());
            slot.state = SlotState::Failed { retry_at: Instant::now() + wait };
        }
        (refusal, wait)
    }

    /// Forgets the question of an experiment that has ended or was deleted.
    pub(crate) fn forget(&self, key: &Key) {
        self.lock().remove(key);
    }

    /// Forgets all questions. The next leader asks them again.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// Waits for a question to ask. `asking` has the namespace of each question on its way.
    async fn next<T>(&self, asking: &HashMap<T, Arc<str>>) -> (Key, String, Request) {
        loop {
            let changed = self.changed.notified();
            let queued = self.take_queued(asking);
            match queued {
                Some(queued) => return queued,
                None => changed.await,
            }
        }
    }

    /// Takes the oldest question that was not asked yet. Skips namespaces that have used their
    /// share.
    fn take_queued<T>(&self, asking: &HashMap<T, Arc<str>>) -> Option<(Key, String, Request)> {
        let mut num_asking: HashMap<&str, usize> = HashMap::new();
        for namespace in asking.values() {
            *num_asking.entry(namespace).or_default() += 1;
        }
        let has_share = |key: &Key| {
            num_asking.get(&*key.namespace).is_none_or(|num| *num < NAMESPACE_QUESTIONS_MAX)
        };
        let mut slots = self.lock();
        let queued = slots
            .iter_mut()
            .filter(|(key, slot)| matches!(slot.state, SlotState::Queued(_)) && has_share(key));
        let (key, slot) = queued.min_by_key(|(_, slot)| slot.turn)?;
        match std::mem::replace(&mut slot.state, SlotState::Asking) {
            SlotState::Queued(request) => Some((key.clone(), slot.uid.clone(), *request)),
            _ => None,
        }
    }

    /// Records the end of a question.
    fn finish(&self, key: &Key, uid: &str, answer: Result<Answer, AskError>) {
        let is_current = |slot: &&mut Slot| slot.uid == uid;
        match answer {
            Ok(answer) => {
                if let Some(slot) = self.lock().get_mut(key).filter(is_current) {
                    slot.state = SlotState::Answered(answer);
                }
            }
            Err(error) => {
                if self.lock().get_mut(key).filter(is_current).is_some() {
                    self.refuse(key, &error);
                }
            }
        }
    }
}

/// Asks the questions of all experiments while this replica leads: first in, first out, with a
/// limit for each namespace.
pub(crate) async fn ask_all(context: Arc<Context>) {
    let mut questions = JoinSet::new();
    let mut asking: HashMap<task::Id, Arc<str>> = HashMap::new();
    loop {
        tokio::select! {
            (key, uid, request) = context.searchers.next(&asking),
                if questions.len() < QUESTIONS_MAX =>
            {
                let (context, namespace) = (context.clone(), key.namespace.clone());
                let question = questions.spawn(async move {
                    let answer = ask(&context.client, &request).await;
                    if let Err(error) = &answer {
                        tracing::warn!(experiment = %key, %error, "no answer of the searcher");
                    }
                    context.searchers.finish(&key, &uid, answer);
                    context.experiment_queue.add(key);
                });
                asking.insert(question.id(), namespace);
            }
            Some(ended) = questions.join_next_with_id() => {
                asking.remove(&ended.map_or_else(|error| error.id(), |(id, ())| id));
            }
        }
    }
}

async fn ask(client: &Client, request: &Request) -> Result<Answer, AskError> {
    let Request { url, namespace, question } = request;
    let parsed = SearcherUrl::parse(url).ok();
    let Some((url, SearcherHost::Service(name))) = parsed.as_ref().map(|url| (url, &url.host))
    else {
        // Validation refuses such an experiment.
        return Err(AskError::Unavailable(format!("{url} is not a Service of the namespace")));
    };
    let services: Api<Service> = Api::namespaced(client.clone(), namespace);
    let operation = format!("read service {namespace}/{name}");
    let service = crate::error::request(operation, services.get_opt(name)).await;
    let service = service.map_err(|error| AskError::Unavailable(error.to_string()))?;
    let host = url.host.name_in(namespace);
    let address = address_of(service.as_ref(), &host).map_err(|why| {
        AskError::Unavailable(format!(
            "cannot ask the external searcher: service {namespace}/{name} {why}"
        ))
    })?;
    stoker_searcher::ask_at(&address, &host, url, question).await
}

/// Returns the address of a Service, which is `host` if it is headless.
///
/// The name of a Service of the type `ExternalName` leads to any host that its user chooses. A
/// cluster IP is not looked up, so a change of the type after this check has no effect.
fn address_of(service: Option<&Service>, host: &str) -> Result<String, &'static str> {
    let Some(service) = service else { return Err("not found; create it") };
    let spec = service.spec.as_ref();
    if spec.and_then(|spec| spec.type_.as_deref()) == Some("ExternalName") {
        return Err("has the type ExternalName; use another type");
    }
    match spec.and_then(|spec| spec.cluster_ip.as_deref()) {
        Some("None") => Ok(host.to_owned()),
        Some(address) if !address.is_empty() => Ok(address.to_owned()),
        Some(_) | None => Err("has no cluster IP; use a Service that has one or is headless"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use stoker_api::external::QuestionSpec;

    use super::*;

    fn request() -> Request {
        let spec = QuestionSpec { searcher: json!({}), hyperparameters: json!({}) };
        let experiment = "a-1".to_owned();
        let question =
            Question { version: 1, experiment, call: 0, spec, events: vec![], history: None };
        Request { url: "http://a".to_owned(), namespace: "ns".to_owned(), question }
    }

    #[test]
    fn external_names_are_not_asked() {
        let address = |spec: serde_json::Value| {
            let service = serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap();
            address_of(Some(&service), "s.ns.svc")
        };
        assert_eq!(address(json!({ "clusterIP": "10.0.0.7" })), Ok("10.0.0.7".to_owned()));
        assert_eq!(address(json!({ "clusterIP": "None" })), Ok("s.ns.svc".to_owned()));
        let external = json!({ "type": "ExternalName", "externalName": "other.example" });
        assert!(address(external).unwrap_err().contains("ExternalName"));
        assert!(address(json!({})).is_err());
        assert!(address_of(None, "s.ns.svc").unwrap_err().starts_with("not found"));
    }

    fn no_question() -> HashMap<usize, Arc<str>> {
        HashMap::new()
    }

    const FIRST: Asked = Asked { call: 0, through: 3 };

    #[tokio::test(flavor = "current_thread")]
    async fn question_is_asked_once_and_answered_once() {
        let (searchers, key) = (Searchers::default(), Key::new("ns", "a"));
        let answer = Answer { call: 0, actions: vec![] };
        assert_eq!(searchers.poll(&key, "1", FIRST, request), Progress::Asking(None));
        let (asking, uid, _) = searchers.next(&no_question()).await;
        assert_eq!((&asking, uid.as_str()), (&key, "1"));
        // A deletion may change the last event while the question is on its way.
        let later = Asked { call: 0, through: 5 };
        let again = || -> Request { panic!("asked twice") };
        assert_eq!(searchers.poll(&key, "1", later, again), Progress::Asking(None));
        searchers.finish(&key, "1", Ok(answer.clone()));
        let answered = Progress::Answered(FIRST, answer.clone());
        assert_eq!(searchers.poll(&key, "1", later, again), answered);
        // If the answer could not be recorded, the question is asked again.
        assert_eq!(searchers.poll(&key, "1", later, request), Progress::Asking(None));
        searchers.next(&no_question()).await;
        // An answer to an experiment of the same name that was deleted is dropped.
        assert_eq!(searchers.poll(&key, "2", FIRST, request), Progress::Asking(None));
        searchers.finish(&key, "1", Ok(answer));
        assert_eq!(searchers.poll(&key, "2", FIRST, again), Progress::Asking(None));
    }

    #[tokio::test]
    async fn failures_are_retried_and_reported_until_an_answer() {
        let (searchers, key) = (Searchers::default(), Key::new("ns", "a"));
        searchers.poll(&key, "1", FIRST, request);
        searchers.next(&no_question()).await;
        searchers.finish(&key, "1", Err(AskError::Unavailable("down".to_owned())));
        let progress = searchers.poll(&key, "1", FIRST, request);
        let Progress::Failed(refusal, wait) = progress else { panic!("{progress:?}") };
        assert_eq!(refusal.reason, "SearcherUnavailable");
        tokio::time::sleep(wait).await;
        let again = searchers.poll(&key, "1", FIRST, request);
        assert_eq!(again, Progress::Asking(Some(refusal)));
        searchers.next(&no_question()).await;
        let (_, wait) = searchers.refuse(&key, &AskError::BadAnswer("no".to_owned()));
        assert_eq!(wait.as_secs(), 2);
        // Another question begins without the failures of this one.
        searchers.accept(&key);
        let next = Asked { call: 1, through: 9 };
        assert_eq!(searchers.poll(&key, "1", next, request), Progress::Asking(None));
    }

    #[test]
    fn questions_are_asked_in_order() {
        let searchers = Searchers::default();
        let keys: Vec<Key> = (0..9).map(|idx| Key::new("ns", &format!("e{}", idx % 7))).collect();
        for key in &keys[..7] {
            searchers.poll(key, "1", FIRST, request);
        }
        let take = || searchers.take_queued(&no_question()).map(|(key, ..)| key);
        let answer = || Ok(Answer { call: 0, actions: vec![] });
        for (idx, key) in keys[..7].iter().enumerate() {
            assert_eq!(take().as_ref(), Some(key), "{idx}");
            // The next question of the first two experiments comes after those of the others.
            if idx < 2 {
                let next = Asked { call: 1, through: 9 };
                searchers.finish(key, "1", answer());
                searchers.poll(key, "1", next, request);
            }
        }
        assert_eq!([take(), take(), take()], [Some(keys[7].clone()), Some(keys[8].clone()), None]);
    }

    #[test]
    fn one_namespace_cannot_use_all_questions() {
        let searchers = Searchers::default();
        let poll = |namespace: &str, idx: usize| {
            searchers.poll(&Key::new(namespace, &format!("e{idx}")), "1", FIRST, request);
        };
        (0..200).for_each(|idx| poll("a", idx));
        poll("b", 0);
        let mut asking = no_question();
        while let Some((key, ..)) = searchers.take_queued(&asking) {
            asking.insert(asking.len(), key.namespace);
        }
        let num_of = |name: &str| asking.values().filter(|namespace| &***namespace == name).count();
        assert_eq!((num_of("a"), num_of("b")), (NAMESPACE_QUESTIONS_MAX, 1));
        // The end of a question makes the next one of its namespace possible.
        asking.remove(&0);
        let next = searchers.take_queued(&asking).map(|(key, ..)| key);
        assert_eq!(next, Some(Key::new("a", &format!("e{NAMESPACE_QUESTIONS_MAX}"))));
    }
}
