//! Lets an external searcher decide, and writes its decisions.

use std::time::Duration;

use kube::ResourceExt as _;
use stoker_api::validate::ValidExperiment;
use stoker_engine::experiment::{Ledger, Refusal, Request};

use super::apply::Writer;
use crate::cache::Key;
use crate::error::Error;
use crate::searchers::{self, Progress};

/// State of a search that waits for its searcher.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Why the searcher has not answered.
    pub(super) refusal: Option<Refusal>,
    /// Delay until the question is repeated.
    pub(super) wait: Option<Duration>,
}

/// Takes in the answer that has arrived, if any, and asks the next question. Sets the error of a
/// creation.
pub(super) async fn take_answers(
    writer: &mut Writer<'_>,
    ledger: &mut Ledger,
    valid: &ValidExperiment,
    request: Request,
    creation: &mut Option<Error>,
) -> Result<Waiting, Error> {
    let searchers = &writer.context.searchers;
    let key = Key::of(&writer.experiment);
    let uid = writer.experiment.metadata.uid.clone().unwrap_or_default();
    while let Some(asked) = ledger.asks() {
        let question = || {
            let tag_of = |trial| writer.trial(trial).and_then(|trial| trial.spec.tag.clone());
            let search = valid.spec.searcher.external.as_ref();
            searchers::Request {
                url: search.and_then(|search| search.url.clone()).unwrap_or_default(),
                namespace: writer.experiment.namespace().unwrap_or_default(),
                question: ledger.question(asked, valid, &uid, tag_of),
            }
        };
        let (asked, answer) = match searchers.poll(&key, &uid, asked, question) {
            Progress::Asking(refusal) => return Ok(Waiting { refusal, wait: None }),
            Progress::Failed(refusal, wait) => {
                return Ok(Waiting { refusal: Some(refusal), wait: Some(wait) });
            }
            Progress::Answered(asked, answer) => (asked, answer),
        };
        let writes = match ledger.answer_on_cluster(asked, answer, request.now) {
            Ok(writes) => writes,
            Err(why) => {
                let error = stoker_searcher::refused(&why);
                let (refusal, wait) = searchers.refuse(&key, &error);
                return Ok(Waiting { refusal: Some(refusal), wait: Some(wait) });
            }
        };
        searchers.accept(&key);
        let decided = ledger.decisions(None, &writes);
        writer.turn(writes, decided).await?;
        if let Err(error) = writer.create(ledger, request).await {
            *creation = Some(error);
            break;
        }
    }
    Ok(Waiting::default())
}
