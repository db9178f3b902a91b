//! Lets the search of an experiment decide, and writes its decisions.

use std::sync::Arc;
use std::time::Duration;

use stoker_api::decisions::PriorTrial;
use stoker_api::experiment::{DesiredState, ReopenRequest};
use stoker_api::time::Timestamp;
use stoker_api::validate::ValidExperiment;
use stoker_engine::experiment::{
    Ledger, Refusal, Request, Unreadable, Write, desired_states, full_log, refused_deletions,
    refused_edit, without_search,
};
use stoker_engine::search::SearchConfig;

use super::answers::{Waiting, take_answers};
use super::apply::Writer;
use super::edits::large_edit;
use super::kept::{self, Kept};
use crate::cache::Key;
use crate::error::Error;

/// Outcome of the decisions of a pass.
pub(super) struct Decided {
    pub(super) ledger: Arc<Ledger>,
    /// Delay until a trial releases its GPUs, the search reaches a limit, or a question is asked
    /// again.
    pub(super) wake: Option<Duration>,
    /// Error of a trial's creation.
    pub(super) creation: Option<Error>,
    /// Why the search cannot begin yet, or waits for its external searcher.
    pub(super) refusal: Option<Refusal>,
}

/// Lets the search take in what is recorded, and writes what follows from it: turns, new trials and
/// desired states. After an error, the rest follows in the next pass. Keeps the search for the next
/// pass if it is in step with the record.
pub(super) async fn decide(
    writer: &mut Writer<'_>,
    kept: Option<Kept>,
    (valid, config): (&ValidExperiment, &SearchConfig),
    request: Request,
    is_failed: bool,
) -> Result<Decided, Unreadable> {
    let (mut ledger, missing) = writer.search(kept, config)?;
    let is_over = matches!(request.state, DesiredState::Cancelled | DesiredState::Killed);
    let mut creation = None;
    let mut is_recorded = true;
    let mut ask_wait = None;
    let status = writer.status();
    let full = full_log(config, valid.spec.reopen, &status.log);
    let reopen = valid.spec.reopen.filter(|_| full.is_none());
    let mut refusal = refused_numbers(writer, (valid, config), &ledger, request.now).or(full);
    // The search cannot follow the edit, so it continues with its own numbers.
    let recorded = ledger.config().clone();
    let config = if refusal.is_some() { &recorded } else { config };
    let prior = match ledger.has_begun() || is_over || is_failed {
        true => Ok(vec![]),
        false => writer.prior_trials(valid),
    };
    if is_over || is_failed {
        // Nothing is decided any more. The outcome depends on whether the search has ended.
        for fact in ledger.pending(writer.records()) {
            ledger.advance(&fact);
        }
    } else {
        match prior {
            Err(refused) => refusal = Some(refused),
            Ok(prior) => {
                let input = Input { config, reopen, prior, missing, request };
                match take_all(writer, &mut ledger, valid, input, &mut creation).await {
                    Ok(waiting) => {
                        refusal = waiting.refusal.or(refusal);
                        ask_wait = waiting.wait;
                    }
                    Err(error) => {
                        writer.errors.push(error);
                        is_recorded = false;
                    }
                }
            }
        }
    }
    if !is_recorded || creation.is_some() {
        // The memory is ahead of the record.
        ledger = writer.rebuild(config)?.0;
    }
    let release = want(writer, &ledger, request, is_recorded).await;
    if is_recorded && creation.is_none() {
        writer.unpin(&ledger).await;
    }
    let limit = match is_over || is_failed {
        true => None,
        false => ledger.seconds_to_limit(&writer.spending(config), request.now),
    };
    let wake = release.into_iter().chain(limit).map(Duration::from_secs);
    let wake = wake.chain(ask_wait).min();
    let ledger = Arc::new(ledger);
    let is_decided = !is_over && !is_failed;
    let is_in_step = is_recorded && creation.is_none() && writer.is_all_stored;
    if is_decided && is_in_step && writer.errors.is_empty() {
        writer.keep(&ledger);
    }
    Ok(Decided { ledger, wake, creation, refusal })
}

/// Returns why the search cannot follow edited numbers of trials.
fn refused_numbers(
    writer: &Writer<'_>,
    (valid, config): (&ValidExperiment, &SearchConfig),
    ledger: &Ledger,
    now: Timestamp,
) -> Option<Refusal> {
    let log = kept::log(&writer.experiment);
    let num_created = ledger.book().next_index() - ledger.num_uncreated();
    refused_edit(&valid.spec.searcher, log, num_created)
        .or_else(|| large_edit(writer, ledger, config, now))
}

/// Writes the desired states of the trials. While a turn is not recorded, no trial starts. Returns
/// the number of seconds until a trial releases its GPUs.
async fn want(
    writer: &mut Writer<'_>,
    ledger: &Ledger,
    request: Request,
    is_recorded: bool,
) -> Option<u64> {
    let desired = desired_states(ledger, &writer.records(), request);
    if is_recorded || request.state != DesiredState::Active {
        writer.want(&desired.wanted).await;
    } else if writer.errors.iter().any(|error| matches!(error, Error::Refused { .. })) {
        // Nothing may be decided for a long time. Other errors pass soon.
        want_without_search(writer, request).await;
    }
    desired.wake_seconds
}

/// Writes the desired states of the trials while the search cannot decide. Returns the delay until
/// the next reconcile.
pub(super) async fn want_without_search(writer: &mut Writer<'_>, request: Request) -> Duration {
    let desired = without_search(&writer.records(), request);
    writer.want(&desired.wanted).await;
    let resync = writer.context.resync_interval(&Key::of(&writer.experiment));
    desired.wake_seconds.map_or(resync, |seconds| resync.min(Duration::from_secs(seconds)))
}

/// Writes all turns that follow from the record, and from the answers of an external searcher.
async fn take_all(
    writer: &mut Writer<'_>,
    ledger: &mut Ledger,
    valid: &ValidExperiment,
    input: Input<'_>,
    creation: &mut Option<Error>,
) -> Result<Waiting, Error> {
    let request = input.request;
    writer.check_settled()?;
    let full = take_turns(writer, ledger, input, creation).await?;
    if creation.is_some() || request.state != DesiredState::Active {
        return Ok(Waiting { refusal: full, wait: None });
    }
    let waiting = take_answers(writer, ledger, valid, request, creation).await?;
    Ok(Waiting { refusal: waiting.refusal.or(full), ..waiting })
}

/// What the user wants, and what is missing in the record.
struct Input<'a> {
    /// The search as the spec says.
    config: &'a SearchConfig,
    /// Latest request to reopen trials.
    reopen: Option<ReopenRequest>,
    prior: Vec<PriorTrial>,
    missing: Vec<Write>,
    request: Request,
}

/// Writes all turns that follow from the record. Each turn is complete before the next one. Sets
/// the error of a creation. Returns why the search cannot take in deleted trials.
async fn take_turns(
    writer: &mut Writer<'_>,
    ledger: &mut Ledger,
    Input { config, reopen, prior, missing, request }: Input<'_>,
    creation: &mut Option<Error>,
) -> Result<Option<Refusal>, Error> {
    let missing = missing.into_iter().filter_map(|write| match write {
        Write::Grant { trial, grant } => Some((trial, grant)),
        Write::Log(_) | Write::Pin { .. } => None,
    });
    for effect in missing {
        writer.effects(vec![effect]).await?;
    }
    let writes = ledger.begin(env!("CARGO_PKG_VERSION"), prior, request.now);
    writer.turn(writes, vec![]).await?;
    let spending = writer.spending(config);
    let edited = ledger.edit(config, &spending, |index| writer.record(index), request.now);
    // Trials that the edit continues have not ended yet. Their ends lead to the next pass.
    let Some(writes) = edited else { return Ok(None) };
    let decided = ledger.decisions(None, &writes);
    writer.turn(writes, decided).await?;
    let full = refused_deletions(&writer.status().log);
    let deleted = match full {
        None => writer.deleted(ledger).await?,
        Some(_) => vec![],
    };
    let full = full.filter(|_| writer.lacks_trials(ledger));
    if !deleted.is_empty() {
        let writes = ledger.delete(deleted, request.now);
        let decided = ledger.decisions(None, &writes);
        writer.turn(writes, decided).await?;
    }
    let writes = ledger.reach_limit(&writer.spending(ledger.config()), request.now);
    let decided = ledger.decisions(None, &writes);
    writer.turn(writes, decided).await?;
    if let Err(error) = writer.create(ledger, request).await {
        *creation = Some(error);
        return Ok(full);
    }
    for fact in ledger.pending(writer.records()) {
        let writes = ledger.advance(&fact);
        let decided = ledger.decisions(Some(&fact), &writes);
        writer.turn(writes, decided).await?;
        if let Err(error) = writer.create(ledger, request).await {
            *creation = Some(error);
            return Ok(full);
        }
    }
    let spending = writer.spending(ledger.config());
    let writes = ledger.reopen(reopen, &spending, |index| writer.record(index), request.now);
    let decided = ledger.decisions(None, &writes);
    writer.turn(writes, decided).await?;
    if let Err(error) = writer.create(ledger, request).await {
        *creation = Some(error);
    }
    Ok(full)
}
