//! The operator binary against a real API server. There are no nodes: a scripted kubelet sets the
//! status of pods, and scripted trainers report to the report server.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue panics")]

mod audit;
mod bench;
mod edits;
mod events;
mod external;
mod failures;
mod fencing;
mod flow;
mod jobs;
mod kubelet;
mod leaders;
mod malformed;
mod operator_process;
mod policy;
mod population;
mod promotion;
mod proxy;
mod records;
mod refusals;
mod reports;
mod setup;
mod standby;
mod starts;
mod storage;
mod tcp_forwarder;
mod trainer;
mod upgrade;
mod worker;
mod writes;
