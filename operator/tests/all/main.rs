//! The operator's own program against a real API server. There are no nodes: a scripted kubelet says
//! what becomes of pods, and scripted trainers report to the door.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod audit;
mod bench;
mod doors;
mod events;
mod failures;
mod flow;
mod jobs;
mod kubelet;
mod leaders;
mod proxy;
mod refusals;
mod setup;
mod standby;
mod starts;
mod storage;
mod upgrade;
mod worker;
mod writes;
