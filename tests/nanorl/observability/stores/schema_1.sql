BEGIN TRANSACTION;
CREATE TABLE rollouts (
    rollout_id TEXT PRIMARY KEY,
    task_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,
    status TEXT NOT NULL,
    reward REAL,
    num_tokens INTEGER NOT NULL,
    num_turns INTEGER NOT NULL,
    content_hash TEXT NOT NULL,
    extra TEXT NOT NULL,
    tokens BLOB NOT NULL,
    loss_mask BLOB NOT NULL,
    logps BLOB NOT NULL,
    versions BLOB NOT NULL
);
INSERT INTO "rollouts" VALUES('s4-g0-m0','sums-0f3a','s4-g0',4,4,'finished',1.0,6,2,'75452ecc4cfbfc697d550e2872f0347e82cee05cca98bc59ab93305cebd549f0','{"turn_spans": [[2, 4, 5], [5, 6, 6]], "turn_rewards": [0.1, 0.0], "metrics": {"num_executions": 1.0}}',X'7C6931780163651311E514030000F90054',X'7C693178016360606464600400000E0004',X'3C663878016360C0000EC6C697F7CF9A09021FF7C36421FC93FB01BB5E0C9F',X'7C69317801FBFF9F85E53F0B000D19030A');
INSERT INTO "rollouts" VALUES('s4-g0-m1','sums-0f3a','s4-g0',4,4,'failed',NULL,6,2,'75452ecc4cfbfc697d550e2872f0347e82cee05cca98bc59ab93305cebd549f0','{"turn_spans": [[2, 4, 5], [5, 6, 6]], "turn_rewards": [], "metrics": {}}',X'7C6931780163651311E514030000F90054',X'7C693178016360606464600400000E0004',X'3C663878016360C0000EC6C697F7CF9A09021FF7C36421FC93FB01BB5E0C9F',X'7C69317801FBFF9F85E53F0B000D19030A');
INSERT INTO "rollouts" VALUES('s10-g0-m0','sums-0f3a','s10-g0',10,4,'finished',0.0,8,3,'c30a465971d29de42c189987155f0f26b9dd0dc3f89666a089791d932668a4c3','{"turn_spans": [[2, 4, 5], [5, 6, 6]], "turn_rewards": [0.1, 0.0], "metrics": {"num_executions": 1.0}, "branches": [{"tokens": "fGkxeAFjZAIAAAYABA==", "loss_mask": "fGkxeAFjYAQAAAMAAg==", "logps": "PGY0eAFjYACD/QAAxwDA", "versions": "fGkxeAH7zwIAAgQBBA==", "turn_spans": [[1, 2, 2]], "turn_rewards": [], "is_history": true}]}',X'7C6931780163651311E514030000F90054',X'7C693178016360606464600400000E0004',X'3C663878016360C0000EC6C697F7CF9A09021FF7C36421FC93FB01BB5E0C9F',X'7C69317801FBFF9F85E53F0B000D19030A');
CREATE INDEX by_step ON rollouts (step, group_id);
CREATE INDEX by_task ON rollouts (task_id, step);
CREATE INDEX by_group ON rollouts (group_id);
CREATE INDEX by_version ON rollouts (version);
CREATE INDEX by_hash ON rollouts (content_hash);
CREATE INDEX by_status ON rollouts (status);
COMMIT;
PRAGMA user_version = 1;
